"""Who is up: every engine replica and gateway says so once a second, in Redis. The facts `gearshift status` shows."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

import msgspec
import psutil

from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.request import EngineStats

EVALUATOR = ":evaluator"
"""In the place of a model's name, which has no colon."""
BEAT_S = 0.5
STALE_S = 5.0


class Ttft(msgspec.Struct, frozen=True, array_like=True):
    """Times to first token of the last minute, in s, and of how many answers."""

    p50: float = 0.0
    p99: float = 0.0
    count: int = 0


class Member(msgspec.Struct, frozen=True):
    """One live process. `model` is the instance that an engine belongs to, and empty for a gateway; `address` is the path of
    an engine's socket; `revision` is what a gateway or an evaluator works by."""

    name: str
    model: str
    address: str
    pid: int
    seen_at: float
    rss_bytes: int
    stats: EngineStats = EngineStats()
    revision: int = 0
    ranks: tuple[int, ...] = ()
    """Pids of an engine's other ranks, which compute with it."""
    ttft: Ttft = Ttft()
    """Of a gateway."""


async def beat(store: Store, member: Callable[[], Member]) -> None:
    """Runs until cancelled. While Redis is away nobody is told, and nobody needs to be: connections stay."""
    while True:
        try:
            current = member()
            await store.hash_set(store.key("members"), current.name, msgspec.msgpack.encode(current))
        except StoreAway:
            pass
        await asyncio.sleep(BEAT_S)


async def members(store: Store) -> list[Member]:
    """Everybody who was heard of within `STALE_S`. Raises `StoreAway`."""
    raw = await store.hash_all(store.key("members"))
    found = [msgspec.msgpack.decode(value, type=Member) for value in raw.values()]
    for member in found:
        if time.time() - member.seen_at > STALE_S:
            await store.hash_delete(store.key("members"), member.name)
    return sorted((m for m in found if time.time() - m.seen_at <= STALE_S), key=lambda m: (m.model, m.name))


async def leave(store: Store, name: str) -> None:
    try:
        await store.hash_delete(store.key("members"), name)
    except StoreAway:
        return


def here(
    name: str,
    model: str = "",
    address: str = "",
    stats: EngineStats | None = None,
    revision: int = 0,
    ranks: Sequence[int] = (),
    ttft: Ttft = Ttft(),  # noqa: B008 -- frozen
) -> Member:
    """This process, now."""
    rss, now = psutil.Process().memory_info().rss, time.time()
    stats = stats or EngineStats()
    return Member(name, model, address, os.getpid(), now, rss, stats, revision, tuple(ranks), ttft)
