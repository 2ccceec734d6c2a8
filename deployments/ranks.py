"""The ranks of one replica as Ray actors, in the replica's own placement group: the replica's process is the first of them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gearshift.platform.config import Model
from gearshift.platform.errors import EngineUnavailable
from gearshift.platform.weights import source

if TYPE_CHECKING:  # torch is for those who compute
    from gearshift.platform.engine.bridge import AsyncEngine
    from gearshift.platform.engine.parallel import Place

log = logging.getLogger(__name__)

CPU_SHARE = 0.01
"""Of a bundle: Ray wants something of it, and what a rank really takes is for `threads` to say."""

ACCELERATOR_SHARE = 0.001
"""Of the resource that nodes with an accelerator have, one each: what Ray itself asks of it."""


class Rank:
    """Any rank but the first."""

    def pid(self) -> int:
        return os.getpid()

    def follow(self, settings: Model, place: Place) -> None:
        """Until the first rank lets it go."""
        from gearshift.platform.engine.local import follow_rank

        assert settings.source is not None
        weights = source.ensure(source.parse(settings.source)).path  # of the node that this rank is on
        follow_rank(weights, settings, place)


def bundles(settings: Model) -> list[dict[str, float]]:
    """What each rank takes of a node."""
    takes = {"CPU": CPU_SHARE} | settings.resources
    if settings.num_gpus:
        takes["GPU"] = settings.num_gpus
    if settings.accelerator_type is not None:
        takes[f"accelerator_type:{settings.accelerator_type}"] = ACCELERATOR_SHARE
    return [dict(takes) for _ in range(settings.tensor_parallel)]


class Ranks:
    """Owns the actors of all ranks but the first, and watches them."""

    def __init__(self, settings: Model, weights: Path, name: str, folder: Path) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._settings, self._weights = settings, weights
        self._place = meeting_of(settings, name, folder)
        group: Any = ray.util.get_current_placement_group()
        takes: dict[str, Any] = {"num_cpus": CPU_SHARE, "num_gpus": settings.num_gpus, "resources": settings.resources}
        takes |= {"max_restarts": 0, "max_concurrency": 2}
        self._actors = [
            ray.remote(Rank)
            .options(**takes, scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank))
            .remote()
            for rank in range(1, settings.tensor_parallel)
        ]
        self._following = [
            actor.follow.remote(settings, self._place.rank_of(rank)) for rank, actor in enumerate(self._actors, 1)
        ]
        self._watching: asyncio.Task[None] | None = None
        self.pids: Sequence[int] = ()

    async def load(self) -> AsyncEngine:
        """The engine of all ranks. Raises what hindered the first rank that failed."""
        from gearshift.platform.engine.local import load_engine

        self.pids = await asyncio.gather(*(actor.pid.remote() for actor in self._actors))
        loading = asyncio.create_task(asyncio.to_thread(load_engine, self._weights, self._settings, self._place))
        others = [asyncio.create_task(_ended(following)) for following in self._following]
        done, _ = await asyncio.wait([loading, *others], return_when=asyncio.FIRST_COMPLETED)
        ended = next((task for task in done if task is not loading), None)
        if ended is not None:  # while the first one still waits for it
            raise EngineUnavailable(f"A rank did not come up: {ended.result()}")
        engine = loading.result()
        self._watching = asyncio.create_task(self._watch(engine, others))
        return engine

    async def _watch(self, engine: AsyncEngine, others: Sequence[asyncio.Task[str]]) -> None:
        """A rank that ends takes the replica with it, at once and not at the next collective."""
        done, _ = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        engine.lose(f"a rank has ended: {next(iter(done)).result()}")

    def close(self) -> None:
        """Leaves none behind."""
        import ray

        if self._watching is not None:
            self._watching.cancel()
        for actor in self._actors:
            ray.kill(actor)


async def _ended(following: Any) -> str:
    """Why it has."""
    try:
        await following
    except Exception as error:
        return str(error).strip().splitlines()[-1]
    return "it was let go"


def meeting_of(settings: Model, name: str, folder: Path) -> Place:
    """Where the ranks meet: in a file when they share a node, so that nothing listens beyond loopback; else at the first rank's
    address in the cluster."""
    from gearshift.platform.engine.parallel import Place

    if settings.placement == "STRICT_PACK":
        return Place(0, settings.tensor_parallel, str(folder / f"{name}.ranks"))
    import ray

    address = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    return Place(0, settings.tensor_parallel, f"{address}:{port}", address)
