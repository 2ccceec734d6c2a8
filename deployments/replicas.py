"""The two kinds of process that Serve keeps alive: plain classes; serve.py makes deployments of them.

Serve starts, watches and replaces them. Requests do not pass through Serve: a gateway replica listens on the product's
port itself (all of a node share it), and talks to engine replicas over one socket each (wire.py). ARCHITECTURE.md says
what that saves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvicorn

from gearshift.deployments import registry
from gearshift.deployments.cluster import node_address
from gearshift.deployments.control import SnapshotBoard, SnapshotHolder
from gearshift.deployments.corked import CorkedProtocol
from gearshift.deployments.encoder import Encoder, SimilarAnswers
from gearshift.deployments.engine_server import EngineServer
from gearshift.deployments.gateway import create_app
from gearshift.deployments.identity import block_version
from gearshift.deployments.pipeline import Pipeline
from gearshift.deployments.pool import EnginePool
from gearshift.deployments.prober import Prober
from gearshift.deployments.registry import Member, Ttft
from gearshift.deployments.reviews import Reviews
from gearshift.deployments.revisions import Revisions
from gearshift.deployments.samples import SampleLog
from gearshift.deployments.shadow import Shadows
from gearshift.platform.cache.exact import ExactCache
from gearshift.platform.cache.flight import Flights
from gearshift.platform.cache.limits import RateLimits
from gearshift.platform.cache.prompt import PromptCache
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config, Model
from gearshift.platform.engine.bridge import AsyncEngine
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.engine.meter import EngineMeter
from gearshift.platform.engine.protocol import Engine
from gearshift.platform.errors import ConfigError, EngineUnavailable, NotFound
from gearshift.platform.telemetry import Emitter
from gearshift.platform.weights import source
from gearshift.platform.weights.source import Weights
from gearshift.router.arms import Snapshot

if TYPE_CHECKING:
    from gearshift.deployments.ranks import Ranks

log = logging.getLogger(__name__)

BLOCKS_TIMEOUT_S = 2.0
BACKLOG = 2048
DISCOVER_S = 0.25
MEET_S = 3.0
KEEP_ALIVE_S = 75
LINGER_S = 0.5
"""How long connections that were just accepted may still ask and be told that this gateway is shutting down."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this deployment lives: the folder of its sockets, and its Redis. Small, crosses process boundaries, and is the
    same for all revisions. secret: of those who meet over the network; empty where all are on one machine."""

    folder: Path
    redis_url: str
    namespace: str
    timeout_s: float
    drain_timeout_s: float
    secret: str = ""

    @property
    def metrics(self) -> Path:
        """Where the processes of a node put their series together."""
        return self.folder / "metrics"

    def store(self, timeout_s: float | None = None) -> Store:
        return Store(self.redis_url, self.namespace, timeout_s or self.timeout_s)

    def node(self) -> str:
        """Address of the one that this process is on; empty where there is only one."""
        return node_address() if self.secret else ""


class Serving:
    """What a process works by one revision with."""

    def __init__(self, revision: int, config: Config, keys: Mapping[str, str], pipeline: Pipeline) -> None:
        """keys: of each model's engine in the process's pool."""
        self.revision = revision
        self.config = config
        self.keys = keys
        self.pipeline = pipeline


class EngineReplica:
    """One engine of one instance of a model, served to all gateways."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Model, model: str, instance: str, place: Place
    ) -> None:
        self._place = place
        self._node = place.node()
        place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._instance = instance
        self._stage, self._remote = "starting", ""
        self._name = f"{model}-{uuid.uuid4().hex[:8]}"
        self._ranks: Ranks | None = None
        self._block_store: Store | None = None
        self._path = place.folder / f"{self._name}.sock"
        self._store = place.store(registry.STALE_S)  # nobody waits for it, and computing comes first
        self._beating = asyncio.create_task(registry.beat(self._store, self._member))
        self._engine = await self._load(settings)
        self._meter = EngineMeter(model, self._name)
        self._server = EngineServer(self._engine, self._meter.watch)
        self._remote = await self._server.start(self._path, self._node, place.secret)
        self._stage = ""

    async def _load(self, settings: Model) -> Engine:
        if settings.echo is not None:
            return EchoEngine(settings.echo.delay_s, max_running=settings.max_queued_requests + 256)
        from gearshift.platform.engine.local import load_engine  # torch is for those who compute

        assert settings.source is not None
        self._stage = "fetching weights"  # once a node: those of the same one wait for the first
        weights = await asyncio.to_thread(source.ensure, source.parse(settings.source))
        self._stage = "loading weights"
        if settings.tensor_parallel == 1:
            engine = await asyncio.to_thread(load_engine, weights.path, settings, None, self._blocks(settings, weights))
            if engine.prefixes is not None:
                await engine.prefixes.measure()
            return engine
        from gearshift.deployments.ranks import Ranks

        self._ranks = Ranks(settings, weights.path, self._name, self._place.folder)
        return await self._ranks.load()

    def _blocks(self, settings: Model, weights: Weights) -> Callable[[int], PromptCache]:
        """What makes the store of blocks, on a connection of its own: they are large."""

        def make(block_bytes: int) -> PromptCache:
            wanted = settings.prompt_cache
            assert wanted is not None
            self._block_store = self._place.store(BLOCKS_TIMEOUT_S)
            version = block_version(settings, weights.revision)
            name = self._instance.partition("@")[0]
            return PromptCache(self._block_store, name, version, block_bytes, wanted.max_bytes, wanted.ttl_s)

        return make

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        if isinstance(self._engine, AsyncEngine) and not self._engine.healthy:
            raise EngineUnavailable("The engine thread has ended.")

    async def __del__(self) -> None:
        """Called by Serve when the replica is to go: finishes what runs."""
        if not hasattr(self, "_server"):  # it never came up
            return
        await self._server.drain(self._place.drain_timeout_s)
        self._beating.cancel()
        await registry.leave(self._store, self._name)
        await self._server.close()
        await self._engine.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._block_store is not None:
            await self._block_store.close()
        await self._store.close()
        self._path.unlink(missing_ok=True)

    def _member(self) -> registry.Member:
        fixed = Member(name=self._name, model=self._instance, node=self._node, stage=self._stage)
        if self._stage:
            return fixed
        stats = self._engine.stats()
        self._meter.observe(stats)
        return msgspec.structs.replace(
            fixed,
            address=str(self._path),
            remote=self._remote,
            stats=stats,
            ranks=tuple(self._ranks.pids) if self._ranks else (),
            ttft=Ttft(*self._meter.recent.told(time.time())),
        )


class GatewayReplica:
    """One HTTP server with the pipeline in it. A new revision gets a pipeline of its own; requests that have begun finish with
    the one they began with."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, revision: int, revisions: dict[str, str], place: Place
    ) -> None:
        self._place = place
        self._node = place.node()
        self._gateway = config.gateway
        self._name = f"gateway-{uuid.uuid4().hex[:8]}"
        self._store = place.store()
        self._revisions = Revisions(self._store)
        self._pool = EnginePool(self._store, self._node, place.secret, holds=True)
        self._encoder = Encoder(place.secret)
        self._limits = RateLimits(self._store, config.redis.on_loss)
        self._samples = SampleLog(self._store, config)
        self._shadows = Shadows(self._samples)
        self._snapshot = SnapshotHolder(Snapshot.of(config))
        self._emitter = Emitter(config.telemetry)
        self._retiring: list[Serving] = []
        self._following: asyncio.Task[None] | None = None
        with contextlib.suppress(StoreAway, NotFound):  # a gateway that was replaced comes back with what serves by now
            active, revisions = await self._revisions.active()
            config, revision = active.parsed(), active.number
        self._serving = self._build(revision, config, revisions, await self._follow(config))
        token_env = config.telemetry.metrics_token_env
        token = os.environ[token_env] if token_env else None
        app = create_app(
            lambda: self._serving.pipeline,
            config.gateway,
            self._emitter,
            self._missing,
            self._samples,
            self._shadows,
            token,
        )
        self._server = QuietServer(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                http=CorkedProtocol,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        await self._meet_engines()
        self._uvicorn = asyncio.create_task(
            self._server.serve([shared_socket(config.gateway.host, config.gateway.port)])
        )
        self._was_ready = False
        self._tasks = [
            asyncio.create_task(self._discover()),
            asyncio.create_task(self._samples.run()),
            asyncio.create_task(registry.beat(self._store, self._member)),
        ]

    async def _meet_engines(self) -> None:
        """Before anybody is let in: a gateway that takes the place of another one finds engines that run."""
        with contextlib.suppress(TimeoutError, StoreAway):
            async with asyncio.timeout(MEET_S):
                await self._connect()
                while self._away():
                    await asyncio.sleep(DISCOVER_S)
                    await self._connect()

    def _build(self, revision: int, config: Config, weights: Mapping[str, str], snapshot: SnapshotHolder) -> Serving:
        keys = self._pool.keys(config)
        pipeline = Pipeline(
            config,
            self._pool.engines(keys),
            weights,
            self._limits,
            self._flights(config),
            lambda: snapshot.current,
            self._encoder.embed_within(config.embedding.timeout_s) if config.embedding is not None else None,
            self._encoder.name,
            Reviews(self._store, config.review.keep_s),
        )
        return Serving(revision, config, keys, pipeline)

    def _flights(self, config: Config) -> Flights:
        cache, similar = ExactCache(self._store, config.cache.ttl_s, config.cache.max_answer_bytes), None
        if config.cache.semantic is not None and config.embedding is not None:
            timeout_s = config.embedding.timeout_s
            similar = SimilarAnswers(self._encoder, cache, config.cache.semantic, timeout_s, config.cache.ttl_s)
        return Flights(self._store, cache, similar)

    async def _follow(self, config: Config) -> SnapshotHolder:
        """The experiments of this config, as they are by now, and kept up to date from here on."""
        board = SnapshotBoard(self._store, config)
        fitting = SnapshotHolder(board.fitting(self._snapshot.current))
        with contextlib.suppress(StoreAway):  # a release that was rolled back is not served again by a new gateway
            fitting.take(await board.read())
        if self._following is not None:
            self._following.cancel()
        self._following = asyncio.create_task(board.follow(fitting))
        self._snapshot = fitting
        return fitting

    async def _switch(self) -> None:
        """To the revision that is active by now."""
        active, weights = await self._revisions.active()
        config = active.parsed()
        fresh = self._build(active.number, config, weights, await self._follow(config))
        await self._connect(fresh)
        old = self._serving
        self._samples.follow(config)
        self._serving = fresh  # from here on, at once and for every new request
        self._retiring.append(old)

    async def _retire(self) -> None:
        """Lets go of what nobody uses any more."""
        self._retiring = [old for old in self._retiring if old.pipeline.in_use]
        await self._pool.keep(key for each in (*self._retiring, self._serving) for key in each.keys.values())

    def _member(self) -> registry.Member:
        return Member(
            name=self._name,
            node=self._node,
            revision=self._serving.revision,
            ttft=Ttft(*self._emitter.recent.told(time.time())),
            held=self._pool.held(),
            stage=self._missing() or "",
        )

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        assert self._following is not None
        if self._uvicorn.done() or any(task.done() for task in (*self._tasks, self._following)):
            raise EngineUnavailable("A task of the gateway has ended.")

    async def drain(self) -> None:
        """Refuses new requests and waits for the running ones, at most `drain_timeout_s`."""
        self._serving.pipeline.draining = True
        pipelines = [each.pipeline for each in (*self._retiring, self._serving)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._gateway.drain_timeout_s):
                while any(pipeline.inflight for pipeline in pipelines):
                    await asyncio.sleep(0.02)
                for pipeline in pipelines:
                    await pipeline.settled()

    async def __del__(self) -> None:
        """Called by Serve when the replica is to go."""
        if not hasattr(self, "_tasks"):  # it never came up
            return
        await self.drain()
        for listener in self._server.servers:
            listener.close()  # new connections go to the other gateways of the node
        await asyncio.sleep(LINGER_S)
        self._server.should_exit = True
        await self._uvicorn
        await self._shadows.close()
        assert self._following is not None
        for task in (*self._tasks, self._following):
            task.cancel()
        await self._samples.flush()
        await registry.leave(self._store, self._name)
        await self._pool.close()
        self._encoder.close()
        await self._store.close()
        self._emitter.close()

    def _missing(self) -> str | None:
        """What /ready waits for. Once everything was there, one model's loss does not take the gateway out of service."""
        if self._was_ready:
            return None
        away = self._pool.away(self._serving.keys)
        self._was_ready = not away
        return f"no replica of {', '.join(away)}" if away else None

    def _away(self) -> list[str]:
        """What should be there, and is not. Without the encoder caches miss, which is no reason to serve nobody."""
        encoder = ["the encoder"] if self._serving.config.embedding is not None and not self._encoder.ready else []
        return [*self._pool.away(self._serving.keys), *encoder]

    async def _discover(self) -> None:
        while True:
            try:
                await self._connect()
                active = (await self._revisions.head()).active
                if active not in (0, self._serving.revision) and not self._serving.pipeline.draining:
                    await self._switch()
            except StoreAway:
                pass
            except (ConfigError, NotFound) as error:
                log.error("the active revision can't be served: %s", error.message)
            await self._retire()
            await asyncio.sleep(DISCOVER_S)

    async def _connect(self, *fresh: Serving) -> None:
        """To every replica that is up, of every model that somebody may still ask."""
        servings = (*self._retiring, self._serving, *fresh)
        await self._pool.connect(key for each in servings for key in each.keys.values())
        if self._serving.config.embedding is not None and not self._encoder.ready:
            await self._encoder.meet(await registry.members(self._store), self._node)


class EvaluatorReplica:
    """The one process that judges what all the others did."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, revision: int, revisions: dict[str, str], place: Place
    ) -> None:
        self._name = f"evaluator-{uuid.uuid4().hex[:8]}"
        self._store = place.store(registry.STALE_S)
        self._reading = place.store(2 * registry.STALE_S)
        self._emitter = Emitter(config.telemetry)
        self._revision = revision
        self._node = place.node()
        self._pool = EnginePool(self._store, self._node, place.secret)
        self._encoder = Encoder(place.secret)
        self._evaluating = asyncio.create_task(self._evaluate(config, revisions))
        self._tasks = [
            asyncio.create_task(self._follow()),
            asyncio.create_task(registry.beat(self._store, self._member)),
        ]

    async def _evaluate(self, config: Config, weights: Mapping[str, str]) -> None:
        from gearshift.deployments.evaluator import Evaluator  # statistics are for those who judge

        keys = self._pool.keys(config)
        await self._pool.keep(keys.values())
        pipeline = Pipeline(
            config,
            self._pool.engines(keys),
            weights,
            RateLimits(self._store, config.redis.on_loss),
            Flights(self._store, ExactCache(self._store, config.cache.ttl_s, config.cache.max_answer_bytes)),
            lambda: Snapshot.of(config),
            self._encoder.embed_within(config.embedding.timeout_s) if config.embedding is not None else None,
            self._encoder.name,
        )
        prober = Prober(pipeline, lambda: self._pool.away(keys))
        evaluation = config.evaluation
        asks = evaluation.judge is not None or evaluation.canaries is not None
        connecting = asyncio.create_task(self._connect(keys if asks else {}, config.embedding is not None))
        try:
            await Evaluator(config, self._store, self._reading, self._emitter, prober).run()
        finally:
            connecting.cancel()

    async def _connect(self, keys: Mapping[str, str], encodes: bool) -> None:
        """To the engines that it asks by itself and the encoder of their guardrails, until cancelled."""
        while keys:
            with contextlib.suppress(StoreAway):
                await self._pool.connect(keys.values())
                if encodes and not self._encoder.ready:
                    await self._encoder.meet(await registry.members(self._store), self._node)
            await asyncio.sleep(registry.BEAT_S)

    async def _follow(self) -> None:
        """Works by the revision that is active; its state is in Redis, so a new evaluator goes on where the old one was."""
        revisions = Revisions(self._store)
        while True:
            with contextlib.suppress(StoreAway, NotFound, ConfigError):
                if (await revisions.head()).active not in (0, self._revision):
                    active, weights = await revisions.active()
                    config = active.parsed()
                    self._evaluating.cancel()
                    await asyncio.gather(self._evaluating, return_exceptions=True)
                    self._evaluating = asyncio.create_task(self._evaluate(config, weights))
                    self._revision = active.number
            await asyncio.sleep(DISCOVER_S)

    def _member(self) -> registry.Member:
        return Member(name=self._name, model=registry.EVALUATOR, node=self._node, revision=self._revision)

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        if any(task.done() for task in (*self._tasks, self._evaluating)):
            raise EngineUnavailable("A task of the evaluator has ended.")

    async def __del__(self) -> None:
        """Called by Serve when the replica is to go. Nothing is lost: what was not taken in waits in Redis."""
        if not hasattr(self, "_tasks"):
            return
        tasks = [*self._tasks, self._evaluating]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await registry.leave(self._store, self._name)
        await self._pool.close()
        self._encoder.close()
        await self._reading.close()
        await self._store.close()
        self._emitter.close()


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is Serve's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def shared_socket(host: str, port: int) -> socket.socket:
    """A listening socket that all gateway replicas of a node open beside each other; the kernel spreads connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
