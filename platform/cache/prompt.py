"""The prompt cache: KV blocks of prefixes that were asked for more than once, in Redis, for replicas that are new or restarted.

A block is found by the engine's chained hash, which covers all tokens before it and whose they are, under the tenant's name, and
under everything that its numbers depend on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from gearshift.platform.cache.exact import PROMPT, sealed, unsealed
from gearshift.platform.cache.store import Store
from gearshift.platform.telemetry import PROMPT_CACHE

AT_ONCE = 16
"""Blocks of one command, so that others on the connection do not wait long."""

SAVE = """
-- KEYS: by age, of all; ARGV: now, ms to keep, most blocks, then key and block in turns
for place = 4, #ARGV, 2 do
  redis.call('SET', ARGV[place], ARGV[place + 1], 'PX', ARGV[2])
  redis.call('ZADD', KEYS[1], ARGV[1], ARGV[place])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1] - ARGV[2])
local over = redis.call('ZCARD', KEYS[1]) - ARGV[3]
if over > 0 then
  local gone = redis.call('ZPOPMIN', KEYS[1], over)
  for place = 1, #gone, 2 do redis.call('UNLINK', gone[place]) end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return over
"""
USE = """
-- KEYS: by age, of all; ARGV: now, ms to keep, keys. Those that are used stay.
for place = 3, #ARGV do
  redis.call('PEXPIRE', ARGV[place], ARGV[2])
  redis.call('ZADD', KEYS[1], 'XX', ARGV[1], ARGV[place])
end
"""


class PromptCache:
    """Blocks of one version of a model. Raises `StoreAway` where Redis does not answer."""

    def __init__(self, store: Store, model: str, version: str, block_bytes: int, max_bytes: int, ttl_s: float) -> None:
        """version: of all that the numbers in a block depend on."""
        self._store = store
        self._model = model
        self._version = version
        self._block_bytes = block_bytes
        self._most = max(1, max_bytes // block_bytes)
        self._ttl_ms = int(ttl_s * 1000)

    async def count(self, tenant: str, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks are there."""
        there = await self._store.exist([self._key(tenant, each) for each in hashes])
        return there.index(False) if False in there else len(there)

    async def load(self, tenant: str, hashes: Sequence[bytes]) -> list[bytes]:
        """As many of the first blocks as are there, and whole."""
        keys = [self._key(tenant, each) for each in hashes]
        blocks: list[bytes] = []
        for start in range(0, len(keys), AT_ONCE):
            for value in await self._store.get_many(keys[start : start + AT_ONCE]):
                block = unsealed(value)
                if block is None or len(block) != self._block_bytes:
                    break
                blocks.append(block)
            if len(blocks) < min(start + AT_ONCE, len(keys)):
                break
        if blocks:
            await self._store.script(USE, [self._ages], int(time.time() * 1000), self._ttl_ms, *keys[: len(blocks)])
        PROMPT_CACHE.labels(self._model, "loaded").inc(len(blocks))
        return blocks

    async def save(self, tenant: str, blocks: Mapping[bytes, bytes]) -> None:
        """The least recently used ones make room."""
        items = list(blocks.items())
        for start in range(0, len(items), AT_ONCE):
            batch = items[start : start + AT_ONCE]
            flat = [part for known, block in batch for part in (self._key(tenant, known), sealed(block))]
            await self._store.script(SAVE, [self._ages], int(time.time() * 1000), self._ttl_ms, self._most, *flat)
        PROMPT_CACHE.labels(self._model, "stored").inc(len(items))

    @property
    def _ages(self) -> str:
        return self._store.key(f"{PROMPT}-ages", self._version)

    def _key(self, tenant: str, known: bytes) -> str:
        return self._store.key(PROMPT, tenant, self._version, known.hex())
