"""One connection to Redis with many commands in flight.

redis-py's client takes a connection out of a pool for each command and waits for its reply alone, which costs a gateway
more CPU than all of its decisions. Here commands of all requests share one connection, in order; redis-py still makes
the connection (address, TLS, login), packs the commands and parses the replies.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError


class Pipe:
    """Owns the connection, and which reply belongs to whom: the oldest command waits for the next reply."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._pool: ConnectionPool = ConnectionPool.from_url(url, socket_connect_timeout=timeout_s, socket_timeout=None)
        self._timeout_s = timeout_s
        self._connection: AbstractConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._watchdog: asyncio.TimerHandle | None = None
        self._losing: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._packed: list[bytes] = []

    async def call(self, *command: Any) -> Any:
        """The reply. Raises `ResponseError` for one that is an error, `RedisError` or `OSError` when none came in time."""
        connection = self._connection or await self._connect()
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((loop.time() + self._timeout_s, reply))
        if not self._packed:
            loop.call_soon(self._flush)
        self._packed += connection.pack_command(*command)  # in the order of `_waiting`
        if self._watchdog is None:
            self._watchdog = loop.call_later(self._timeout_s, self._watch)
        return await reply

    def _flush(self) -> None:
        """What was asked in one turn of the event loop leaves in one piece. Those who ask wait for replies, so that no more is
        under way than they are; a connection that broke is noticed by who reads from it."""
        packed, self._packed = self._packed, []
        if self._connection is not None and self._connection._writer is not None:
            self._connection._writer.writelines(packed)

    async def close(self) -> None:
        await self._lose(RedisConnectionError("closed"))

    def _watch(self) -> None:
        """One timer for all commands: when the oldest is overdue the connection is given up, and with it all others."""
        self._watchdog = None
        if not self._waiting:
            return
        loop, (deadline, _) = asyncio.get_running_loop(), self._waiting[0]
        if loop.time() < deadline:
            self._watchdog = loop.call_at(deadline, self._watch)
        else:
            overdue = RedisConnectionError(f"no reply within {self._timeout_s:g} s")
            self._losing = loop.create_task(self._lose(overdue))

    async def _connect(self) -> AbstractConnection:
        async with self._connecting:
            if self._connection is None:
                connection = self._pool.make_connection()
                await connection.connect()
                self._connection = connection
                self._reader = asyncio.create_task(self._read(connection))
            return self._connection

    async def _read(self, connection: AbstractConnection) -> None:
        try:
            while True:
                try:
                    self._answer(await connection.read_response(timeout=math.inf))
                except ResponseError as error:
                    self._answer(error)
        except (RedisError, OSError) as error:
            if connection is self._connection:
                await self._lose(error)

    def _answer(self, reply: Any) -> None:
        _, future = self._waiting.popleft()
        if future.done():  # nobody waits any more
            return
        if isinstance(reply, ResponseError):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    async def _lose(self, error: Exception) -> None:
        """Everybody who waits learns of it; the next command connects anew."""
        connection, self._connection = self._connection, None
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        waiting, self._waiting, self._packed = self._waiting, deque(), []
        for _, future in waiting:
            if not future.done():
                future.set_exception(error)
        if connection is not None:
            await connection.disconnect(nowait=True)
