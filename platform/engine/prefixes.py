"""Prefixes that outlive the engine: between its block pool and a store of blocks that all replicas of a model share.

Blocks of a prefix that somebody asked for again are put there, once; a prompt whose blocks are there and not here loads them,
where that takes less time than computing them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from gearshift.platform.engine.blocks import BlockPool
from gearshift.platform.engine.sequence import Sequence as Generation

log = logging.getLogger(__name__)

FETCH_S = 2.0
"""A prompt waits no longer for its blocks."""
READ_AT_ONCE = 8
"""Blocks that are copied between two steps."""
PROBED = 8
"""Blocks."""
REMEMBERED = 100_000
MARGIN = 0.5
"""Loading is worth its trouble when it takes at most such a part of the time that computing would."""

OnEngine = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs something between two steps, in the thread that owns the pool and the cache."""


class BlockStore(Protocol):
    """Where blocks outlive an engine; see platform/cache/prompt.py. May raise anything: nobody waits for it."""

    async def count(self, tenant: str, hashes: Sequence[bytes]) -> int: ...

    async def load(self, tenant: str, hashes: Sequence[bytes]) -> list[bytes]: ...

    async def save(self, tenant: str, blocks: Mapping[bytes, bytes]) -> None: ...


class Blocks(Protocol):
    """The cache's side of a block: its keys and values as bytes."""

    def export(self, block: int) -> bytes: ...

    def restore(self, block: int, content: bytes) -> None: ...


class Prefixes:
    """Decides what is stored and what is loaded. compute_s: of one token of a prompt, as measured at the start; load_s likewise,
    and from then on what each load took."""

    def __init__(
        self, store: BlockStore, pool: BlockPool, cache: Blocks, min_tokens: int, compute_s: float, load_s: float = 0.0
    ) -> None:
        self._store = store
        self._pool = pool
        self._cache = cache
        self._min_tokens = min_tokens
        self._compute_s = compute_s
        self._load_s = load_s
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._saving: set[asyncio.Task[None]] = set()

    async def measure(self) -> None:
        """Stores and loads a probe, before anything is served."""
        probe = {b"probe %d" % place: self._cache.export(0) for place in range(PROBED)}
        try:
            await self._store.save(":probe", probe)
            begun = time.perf_counter()
            for content in await self._store.load(":probe", list(probe)):
                self._cache.restore(0, content)
            self._load_s = (time.perf_counter() - begun) / (PROBED * self._pool.block_size)
        except Exception as error:
            log.warning("the prompt cache can't be measured: %s", error)

    async def fetch(self, sequence: Generation, on_engine: OnEngine) -> int:
        """Brings blocks of the prompt here; how many. Takes at most `FETCH_S`, and never fails."""
        try:
            async with asyncio.timeout(FETCH_S):
                return await self._fetch(sequence, on_engine)
        except TimeoutError:
            self._load_s = max(self._load_s, 2 * self._compute_s)  # so that the next ones compute
        except Exception as error:
            log.debug("a prefix was not loaded: %s", error)
        return 0

    async def _fetch(self, sequence: Generation, on_engine: OnEngine) -> int:
        hashes = self._pool.hashes(sequence)
        known = next((at for at, each in enumerate(hashes) if not self._pool.knows(each)), len(hashes))
        missing = hashes[known:]
        size = self._pool.block_size
        if len(missing) * size < self._min_tokens or not self._pays:
            return 0
        count = await self._store.count(sequence.tenant, missing)
        if count * size < self._min_tokens:
            return 0
        begun = time.perf_counter()
        blocks = await self._store.load(sequence.tenant, missing[:count])
        found = dict(zip(missing, blocks, strict=False))
        adopted: int = await on_engine(lambda: self._adopt(found))
        if blocks:
            self._load_s += 0.3 * ((time.perf_counter() - begun) / (len(blocks) * size) - self._load_s)
        for each in missing[:adopted]:
            self._remember(each)
        return adopted

    @property
    def _pays(self) -> bool:
        return self._load_s <= MARGIN * self._compute_s

    def _adopt(self, blocks: Mapping[bytes, bytes]) -> int:
        """In the engine's thread, between two steps."""
        count = 0
        for known, content in blocks.items():
            block = self._pool.adopt(known)
            if block is None:
                break
            self._cache.restore(block, content)
            count += 1
        return count

    def asked_again(self, sequence: Generation, on_engine: OnEngine) -> None:
        """The sequence found blocks here that another one had left: they are stored, beside everything else."""
        hot = sequence.hashes[: sequence.cached_tokens // self._pool.block_size]
        fresh = [each for each in hot if each not in self._stored]
        if not fresh or not self._pays:
            return
        for each in fresh:
            self._remember(each)
        task = asyncio.create_task(self._save(sequence.tenant, fresh, on_engine))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, tenant: str, hashes: list[bytes], on_engine: OnEngine) -> None:
        try:
            known = await self._store.count(tenant, hashes)
            for start in range(known, len(hashes), READ_AT_ONCE):
                batch = hashes[start : start + READ_AT_ONCE]
                blocks: dict[bytes, bytes] = await on_engine(partial(self._export, batch))
                await self._store.save(tenant, blocks)
        except Exception as error:
            log.debug("a prefix was not stored: %s", error)
            for each in hashes:
                self._stored.pop(each, None)

    def _export(self, hashes: list[bytes]) -> dict[bytes, bytes]:
        """In the engine's thread, between two steps: those that are still here."""
        places = {each: self._pool.place(each) for each in hashes}
        return {each: self._cache.export(block) for each, block in places.items() if block is not None}

    def _remember(self, known: bytes) -> None:
        self._stored[known] = None
        if len(self._stored) > REMEMBERED:
            self._stored.popitem(last=False)

    async def settled(self) -> None:
        """Returns when what was being stored is."""
        while self._saving:
            await asyncio.wait(self._saving)
