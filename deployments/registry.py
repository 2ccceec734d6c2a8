"""Who is up: every engine replica and gateway says so once a second, in Redis. The facts `gearshift status` shows."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import msgspec
import psutil

from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.request import EngineStats

EVALUATOR, ENCODER = ":evaluator", ":encoder"
"""In the place of a model's instance, which does not begin with a colon."""
SCALES = "scales"
BEAT_S = 0.5
STALE_S = 5.0


class Ttft(msgspec.Struct, frozen=True, array_like=True):
    """Times to first token of the last minute, in s, and of how many answers."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    count: int = 0


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One live process. `model` is the instance that an engine belongs to, and empty for a gateway; `revision` is what a gateway
    or an evaluator works by."""

    name: str
    model: str = ""
    address: str = ""
    """Path of an engine's socket, for those on the same node."""
    remote: str = ""
    """HOST:PORT of the same for the others; empty where there are none."""
    node: str = ""
    """Its address; empty where there is only one."""
    pid: int = 0
    seen_at: float = 0.0
    rss_bytes: int = 0
    stats: EngineStats = EngineStats()
    revision: int = 0
    ranks: tuple[int, ...] = ()
    """Pids of an engine's other ranks, which compute with it."""
    ttft: Ttft = Ttft()
    """Of a gateway's answers, or of an engine's."""
    held: dict[str, int] = {}
    """Of a gateway: requests that wait for an instance to start."""
    stage: str = ""
    """Of an engine that is still starting: what it does. Nobody can connect to it yet."""

    def reached_from(self, node: str) -> str:
        """An engine's address for a process on that node."""
        return self.remote if self.remote and node != self.node else self.address


def is_engine(member: Member) -> bool:
    return bool(member.model) and not member.model.startswith(":")


class Scaled(msgspec.Struct, frozen=True):
    """What an autoscaler did last: how many replicas there shall be, why, and since when."""

    replicas: int
    why: str
    at: float


async def tell_scale(store: Store, key: str, told: Scaled) -> None:
    """key: of the instance. Raises `StoreAway`, as all of these."""
    await store.hash_set(store.key(SCALES), key, msgspec.json.encode(told))


async def scales(store: Store) -> dict[str, Scaled]:
    """By instance."""
    raw = await store.hash_all(store.key(SCALES))
    return {key: msgspec.json.decode(value, type=Scaled) for key, value in raw.items()}


async def scaled(store: Store) -> dict[str, int]:
    """Replicas that each instance had, of those that were ever scaled: where a new process that steers goes on."""
    return {key: told.replicas for key, told in (await scales(store)).items()}


async def forget_scales(store: Store) -> None:
    await store.delete(store.key(SCALES))


async def beat(store: Store, member: Callable[[], Member]) -> None:
    """Runs until cancelled. While Redis is away nobody is told, and nobody needs to be: connections stay."""
    while True:
        try:
            current = stamped(member())
            await store.hash_set(store.key("members"), current.name, msgspec.msgpack.encode(current))
        except StoreAway:
            pass
        await asyncio.sleep(BEAT_S)


async def members(store: Store) -> list[Member]:
    """Everybody who is up. Raises `StoreAway`."""
    return [member for member in await everybody(store) if not member.stage]


async def everybody(store: Store) -> list[Member]:
    """Who was heard of within `STALE_S`, also those that are starting. Raises `StoreAway`."""
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


def stamped(member: Member) -> Member:
    """As this process, now."""
    rss = psutil.Process().memory_info().rss
    return msgspec.structs.replace(member, pid=os.getpid(), seen_at=time.time(), rss_bytes=rss)
