"""Reading an answer while it is still being found out whether it may be given.

A request that came before, byte by byte, most likely asks the same question again: its answer is read in the same round trip to
Redis in which its limits are checked. What is read is used only where the question turns out to be that very one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from gearshift.platform.cache.exact import Answer, ExactCache, Question

KNOWN = 10_000


class Early:
    """An answer that is on its way, and the key of the question that it answers."""

    def __init__(self, key: str, cache: ExactCache) -> None:
        self._key = key
        self._coming = asyncio.ensure_future(cache.read(key))

    async def answer(self, key: str) -> Answer | None:
        """None as well where it answers another question."""
        return await self._coming if key == self._key else None


class Ahead:
    """Owns which requests were answered from the cache lately, and which keys they read. A request is a hash of all that came;
    two with the same hash cost each other a needless read, and nothing else."""

    def __init__(self, cache: ExactCache) -> None:
        self._cache = cache
        self._keys: OrderedDict[int, str] = OrderedDict()

    def begin(self, request: int) -> Early | None:
        """None for a request that isn't known."""
        key = self._keys.get(request)
        return None if key is None else Early(key, self._cache)

    def learn(self, request: int, question: Question) -> None:
        """The request was answered from the cache."""
        self._keys[request] = self._cache.key(question)
        self._keys.move_to_end(request)
        if len(self._keys) > KNOWN:
            self._keys.popitem(last=False)
