"""The engine's end of the wire: serves an `Engine` to every gateway that connects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

from gearshift.deployments.meeting import listen
from gearshift.deployments.wire import Abort, Draining, Failed, Outbox, Piece, Stats, Submit, read_to_engine
from gearshift.platform.engine.protocol import Engine
from gearshift.platform.errors import GearshiftError
from gearshift.platform.request import Delta, Request

log = logging.getLogger(__name__)

STATS_EVERY_S = 0.25

Meter = Callable[[Request, AsyncGenerator[Delta, None]], AsyncGenerator[Delta, None]]
"""Watches a stream of deltas go by; see platform/engine/meter.py."""


class EngineServer:
    """Owns the listening socket and a task for each running request; a gateway that goes away aborts its requests."""

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine = engine
        self._meter = meter
        self._servers: list[asyncio.Server] = []
        self._peers: set[Outbox] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._reporter: asyncio.Task[None] | None = None

    async def start(self, path: Path, host: str = "", secret: str = "") -> str:
        """host: where gateways of other nodes may come from too, if they know the secret. Returns HOST:PORT of that."""
        remote = ""
        self._servers.append(await asyncio.start_unix_server(self._serve, path))
        if host:
            server, remote = await listen(self._serve, host, secret)
            self._servers.append(server)
        self._reporter = asyncio.create_task(self._report())
        return remote

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    async def drain(self, timeout_s: float) -> None:
        """Tells the gateways, then waits until the running requests have ended."""
        self._draining = True
        for peer in self._peers:
            peer.send(Draining())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
        for server in self._servers:
            server.close()
        for peer in self._peers:
            peer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer, running = Outbox(writer), dict[str, asyncio.Task[None]]()
        self._peers.add(peer)
        if self._draining:
            peer.send(Draining())
        try:
            while (messages := await read_to_engine(reader)) is not None:
                for message in messages:
                    match message:
                        case Submit(request):
                            running[request.id] = self._begin(peer, request, running)
                        case Abort(request_id) if request_id in running:
                            running[request_id].cancel()
        finally:
            self._peers.discard(peer)
            for task in running.values():
                task.cancel()
            peer.close()

    def _begin(self, peer: Outbox, request: Request, running: dict[str, asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._generate(peer, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: running.pop(request.id, None))
        return task

    async def _generate(self, peer: Outbox, request: Request) -> None:
        try:
            async with aclosing(self._meter(request, self._engine.generate(request))) as deltas:
                async for delta in deltas:
                    peer.send(Piece(request.id, delta))
        except Exception as error:
            if not isinstance(error, GearshiftError):
                log.exception("request %s failed", request.id)
            peer.send(Failed.of(request.id, error))

    async def _report(self) -> None:
        """Tells every gateway how busy this replica is, which is what they choose by."""
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            stats = Stats(self._engine.stats())
            for peer in self._peers:
                peer.send(stats)
