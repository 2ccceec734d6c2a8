"""The semantic cache: which question that was answered before asks the same as a new one, in other words.

Redis holds the truth, an entry beside each answer and for as long; the vector index is made of it, and whatever only the index
knows is no hit. See `index` for where near questions come from, `paraphrase` and `verifier` for what makes two the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TypeVar

import msgspec
import numpy as np

from gearshift.platform.cache.exact import SEMANTIC, sealed, unsealed
from gearshift.platform.cache.index import Known, Vector, VectorIndex
from gearshift.platform.cache.paraphrase import Pair, Reading, read
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.cache.verifier import Verifier

log = logging.getLogger(__name__)

SWEEP_S = 30.0
BATCH = 200

Embed = Callable[[str], Awaitable[Vector]]
Result = TypeVar("Result")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A question with an answer, in Redis. encoder: whose vector it is; half floats."""

    encoder: str
    text: str
    vector: bytes


class SemanticIndex:
    """Owns the index of this process. encoder: revision of the encoder that `embed` asks."""

    def __init__(
        self, store: Store, index: VectorIndex, verifier: Verifier, embed: Embed, encoder: str, candidates: int
    ) -> None:
        self._store = store
        self._index = index
        self._verifier = verifier
        self._embed = embed
        self._encoder = encoder
        self._candidates = candidates
        self._thread = ThreadPoolExecutor(1, "semantic")
        self._read = lru_cache(10_000)(read)

    async def find(self, partition: str, text: str) -> str | None:
        """The key of the known question that asks the same, most surely so; None where there is none."""
        return await self._run(self._find, partition, text, await self._embed(text))

    async def add(self, partition: str, key: str, text: str, ttl_s: float) -> None:
        """The question has an answer by now. Raises `StoreAway`."""
        vector = await self._embed(text)
        entry = Entry(self._encoder, text, vector.astype(np.float16).tobytes())
        await self._store.set(self._place(partition, key), sealed(msgspec.msgpack.encode(entry)), ttl_s)
        await self._run(self._index.add, partition, key, text, vector)

    async def remove(self, partition: str, key: str) -> None:
        """Its answer is gone."""
        await self._run(self._index.remove, partition, [key])

    async def load(self) -> int:
        """What Redis knows; how much that was. Raises `StoreAway`."""
        count = 0
        async for place in self._store.scan(self._store.key(SEMANTIC, "*")):
            entry = _decoded(await self._store.get(place))
            partition, _, key = place.removeprefix(self._store.key(SEMANTIC, "")).rpartition(":")
            if entry is not None and entry.encoder == self._encoder:
                vector = np.frombuffer(entry.vector, np.float16).astype(np.float32)
                await self._run(self._index.add, partition, key, entry.text, vector)
                count += 1
        return count

    async def sweep(self) -> int:
        """Forgets what Redis has forgotten; how much that was. Raises `StoreAway`."""
        count = 0
        for partition, keys in self._index.keys().items():
            for start in range(0, len(keys), BATCH):
                batch = keys[start : start + BATCH]
                there = await self._store.exist([self._place(partition, key) for key in batch])
                gone = [key for key, known in zip(batch, there, strict=True) if not known]
                if gone:
                    await self._run(self._index.remove, partition, gone)
                    count += len(gone)
        return count

    async def run(self) -> None:
        """Sweeps now and then, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except StoreAway:
                continue

    async def close(self) -> None:
        await self._run(self._index.close)
        self._thread.shutdown()

    def _find(self, partition: str, text: str, vector: Vector) -> str | None:
        near = self._index.nearest(partition, vector, self._candidates)
        if not near:
            return None
        asked = self._read(text)
        return best(self._verifier, asked, vector, near, self._read)

    def _place(self, partition: str, key: str) -> str:
        return self._store.key(SEMANTIC, partition, key)

    async def _run(self, work: Callable[..., Result], *args: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args))


def best(
    verifier: Verifier, asked: Reading, vector: Vector, near: list[Known], reader: Callable[[str], Reading] = read
) -> str | None:
    """The key of the surest one above the threshold."""
    pairs = [Pair.of(asked, reader(known.text)) for known in near]
    scores = verifier.scores(pairs, vector, np.stack([known.vector for known in near]))
    surest = int(scores.argmax())
    return near[surest].key if scores[surest] > verifier.card.threshold else None


def _decoded(value: bytes | None) -> Entry | None:
    """None as well for one that is damaged or of another version."""
    whole = unsealed(value)
    try:
        return None if whole is None else msgspec.msgpack.decode(whole, type=Entry)
    except msgspec.DecodeError:
        return None
