"""The one boundary to Redis. A server that is slow or away costs a request at most one timeout, and then nothing for a
while: the breaker is open, and every call answers `StoreAway` at once."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import redis.asyncio
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gearshift.platform.cache.pipe import Pipe

log = logging.getLogger(__name__)

BREAKER_S = 1.0
SCAN_COUNT = 1000
EXIST = """
local found = {}
for place, key in ipairs(KEYS) do found[place] = redis.call('EXISTS', key) end
return found
"""


class StoreAway(Exception):
    """Redis did not answer. Callers have a plan for it: a cache misses, limits follow `on_loss`."""


class Store:
    """Owns the way to Redis. Values are bytes; every key is under the deployment's namespace."""

    def __init__(self, url: str, namespace: str, timeout_s: float) -> None:
        self.namespace = namespace
        self._pipe = Pipe(url, timeout_s)
        self._listen_url = url
        self._open_until = 0.0
        self._shas: dict[str, str] = {}

    def key(self, *parts: str) -> str:
        return ":".join((self.namespace, *parts))

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._call("GET", key)
        return value

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._call("SET", key, value, "PX", int(ttl_s * 1000))

    async def set_new(self, key: str, value: bytes) -> None:
        """Unless it is set already."""
        await self._call("SET", key, value, "NX")

    async def get_many(self, keys: list[str]) -> list[bytes | None]:
        found: list[bytes | None] = await self._call("MGET", *keys)
        return found

    async def exist(self, keys: list[str]) -> list[bool]:
        """Of each key, whether it does."""
        return [bool(there) for there in await self.script(EXIST, keys)]

    async def scan(self, pattern: str) -> AsyncGenerator[str, None]:
        """Keys that match the glob pattern; one may come twice."""
        cursor = b"0"
        while True:
            cursor, keys = await self._call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
            for key in keys:
                yield key.decode()
            if cursor == b"0":
                return

    async def delete(self, key: str) -> None:
        await self._call("UNLINK", key)

    async def delete_all(self, pattern: str) -> int:
        """Keys that match the glob pattern; returns how many there were."""
        count, cursor = 0, b"0"
        while True:
            cursor, keys = await self._call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
            if keys:
                count += await self._call("UNLINK", *keys)
            if cursor == b"0":
                return count

    async def count_all(self, pattern: str) -> int:
        """Keys that match the glob pattern."""
        return len({key async for key in self.scan(pattern)})

    async def hash_set(self, key: str, field: str, value: bytes) -> None:
        await self._call("HSET", key, field, value)

    async def hash_set_many(self, key: str, *fields_and_values: str | bytes) -> None:
        await self._call("HSET", key, *fields_and_values)

    async def hash_delete(self, key: str, field: str) -> None:
        await self._call("HDEL", key, field)

    async def hash_get(self, key: str, field: str) -> bytes | None:
        value: bytes | None = await self._call("HGET", key, field)
        return value

    async def hash_all(self, key: str) -> dict[str, bytes]:
        found: dict[bytes, bytes] = await self._call("HGETALL", key)
        return {name.decode(): value for name, value in found.items()}

    async def list_push(self, key: str, value: bytes) -> None:
        await self._call("RPUSH", key, value)

    async def list_first(self, key: str) -> bytes | None:
        value: bytes | None = await self._call("LINDEX", key, 0)
        return value

    async def list_last(self, key: str) -> bytes | None:
        value: bytes | None = await self._call("LINDEX", key, -1)
        return value

    async def list_all(self, key: str) -> list[bytes]:
        found: list[bytes] = await self._call("LRANGE", key, 0, -1)
        return found

    async def stream_after(
        self, key: str, position: str, most: int, wait_s: float
    ) -> list[tuple[str, dict[bytes, bytes]]]:
        """Entries after a position, as id and fields; waits for the first. On a store of its own:
        everything else on the same connection waits with it, and `timeout_s` must be longer than `wait_s`."""
        found = await self._call("XREAD", "COUNT", most, "BLOCK", int(wait_s * 1000), "STREAMS", key, position)
        entries = found[key.encode()] if found else []
        return [(place.decode(), dict(zip(flat[::2], flat[1::2], strict=True))) for place, flat in entries]

    async def script(self, lua: str, keys: list[str], *args: str | int | float | bytes) -> Any:
        """Runs a Lua script by its hash, or with its text when the server does not know it (any more)."""
        sha = self._shas.setdefault(lua, hashlib.sha1(lua.encode(), usedforsecurity=False).hexdigest())
        try:
            return await self._call("EVALSHA", sha, len(keys), *keys, *args)
        except NoScriptError:
            return await self._call("EVAL", lua, len(keys), *keys, *args)

    async def listen(self, channel: str) -> AsyncGenerator[bytes, None]:
        """Messages of a channel, for as long as the connection lasts; before them an empty one, once nothing can be missed
        any more. Raises `StoreAway` when it breaks."""
        client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(self._listen_url)
        try:
            async with aclosing(client), client.pubsub() as channels:
                await channels.subscribe(channel)
                async for message in channels.listen():
                    if message["type"] == "subscribe":
                        yield b""
                    elif message["type"] == "message":
                        yield message["data"]
        except (RedisError, OSError) as error:
            raise StoreAway(str(error)) from error

    async def close(self) -> None:
        await self._pipe.close()

    async def _call(self, *command: Any) -> Any:
        if time.monotonic() < self._open_until:
            raise StoreAway("Redis is away")
        try:
            return await self._pipe.call(*command)
        except ResponseError:  # an answer, if a bad one: Redis is there
            raise
        except (RedisError, OSError) as error:
            self._open_until = time.monotonic() + BREAKER_S
            log.warning("Redis is away: %s", error)
            raise StoreAway(str(error)) from error
