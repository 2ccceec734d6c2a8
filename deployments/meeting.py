"""How a gateway reaches an engine replica: by a Unix socket on the same node, else by TCP, where it has to know the secret of the
deployment."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable

CONNECT_TIMEOUT_S = 3.0
IDLE_S, EVERY_S, PROBES = 5, 2, 3
"""A peer whose machine is gone without a word is given up after IDLE_S + EVERY_S * PROBES; the kernel answers for a busy one."""
UNANSWERED_MS = 10_000
SECRET_BYTES = 64
"""Of its hexadecimal form, which is what a peer sends first."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def connect(address: str, secret: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """address: a path, or HOST:PORT. Raises `OSError`, also when nobody answers in time."""
    if address.startswith("/"):
        return await asyncio.open_unix_connection(address)
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(CONNECT_TIMEOUT_S):  # its TimeoutError is an OSError
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    _watch_over(writer)
    writer.write(secret.encode())
    return reader, writer


async def listen(serve: Serve, host: str, secret: str) -> tuple[asyncio.Server, str]:
    """On a port that is free, which comes back with the host, as HOST:PORT. Whoever does not know the secret is not served."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _watch_over(writer)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                said = await reader.readexactly(SECRET_BYTES)
        except (OSError, asyncio.IncompleteReadError):
            said = b""
        if hmac.compare_digest(said, secret.encode()):
            await serve(reader, writer)
        else:
            writer.close()

    server = await asyncio.start_server(guarded, host)
    port = server.sockets[0].getsockname()[1]
    return server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _watch_over(writer: asyncio.StreamWriter) -> None:
    peer = writer.get_extra_info("socket")
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, IDLE_S),
        (socket.TCP_KEEPINTVL, EVERY_S),
        (socket.TCP_KEEPCNT, PROBES),
        (socket.TCP_USER_TIMEOUT, UNANSWERED_MS),
    ):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
