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
import uuid
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from gearshift.deployments import registry
from gearshift.deployments.control import SnapshotBoard, SnapshotHolder
from gearshift.deployments.engine_server import EngineServer
from gearshift.deployments.gateway import create_app
from gearshift.deployments.pipeline import Pipeline
from gearshift.deployments.remote import RemoteEngine
from gearshift.deployments.samples import SampleLog
from gearshift.platform.cache.exact import ExactCache
from gearshift.platform.cache.limits import RateLimits
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config
from gearshift.platform.engine.bridge import AsyncEngine
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.engine.meter import EngineMeter
from gearshift.platform.engine.protocol import Engine
from gearshift.platform.engine.upstream import UpstreamEngine
from gearshift.platform.errors import EngineUnavailable
from gearshift.platform.telemetry import Emitter
from gearshift.router.arms import Snapshot

log = logging.getLogger(__name__)

BACKLOG = 2048
DISCOVER_S = 0.25
KEEP_ALIVE_S = 75
LINGER_S = 0.5
"""How long connections that were just accepted may still ask and be told that this gateway is shutting down."""


class Place:
    """Where this deployment lives: the folder of its sockets, and its Redis. Small, and crosses process boundaries."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.redis_url = redis_url

    def store(self, config: Config, timeout_s: float | None = None) -> Store:
        return Store(self.redis_url, config.redis.namespace, timeout_s or config.redis.timeout_s)


class EngineReplica:
    """One engine of one model, served to all gateways."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, model: str, weights: Path | None, place: Place
    ) -> None:
        settings = config.models[model]
        self._config = config
        self._name = f"{model}-{uuid.uuid4().hex[:8]}"
        self._path = place.folder / f"{self._name}.sock"
        if settings.echo is not None:
            self._engine: Engine = EchoEngine(settings.echo.delay_s, max_running=settings.max_queued_requests + 256)
        else:
            from gearshift.platform.engine.local import load_engine  # torch is for those who compute

            assert weights is not None
            self._engine = await asyncio.to_thread(load_engine, weights, settings)
        self._meter = EngineMeter(model, self._name)
        self._server = EngineServer(self._engine, self._meter.watch)
        self._store = place.store(config, timeout_s=registry.STALE_S)  # nobody waits for it, and computing comes first
        await self._server.start(self._path)
        self._beating = asyncio.create_task(registry.beat(self._store, lambda: self._member(model)))

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        if isinstance(self._engine, AsyncEngine) and not self._engine.healthy:
            raise EngineUnavailable("The engine thread has ended.")

    async def __del__(self) -> None:
        """Called by Serve when the replica is to go: finishes what runs."""
        if not hasattr(self, "_beating"):  # it never came up
            return
        await self._server.drain(self._config.gateway.drain_timeout_s)
        self._beating.cancel()
        await registry.leave(self._store, self._name)
        await self._server.close()
        await self._engine.close()
        await self._store.close()
        self._path.unlink(missing_ok=True)

    def _member(self, model: str) -> registry.Member:
        stats = self._engine.stats()
        self._meter.observe(stats)
        return registry.here(self._name, model, str(self._path), stats)


class GatewayReplica:
    """One HTTP server with the pipeline in it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, revisions: dict[str, str], place: Place
    ) -> None:
        self._config = config
        self._name = f"gateway-{uuid.uuid4().hex[:8]}"
        self._store = place.store(config)
        self._remotes = {name: RemoteEngine(name) for name, model in config.models.items() if model.upstream is None}
        upstreams = {
            name: UpstreamEngine(model.upstream, os.environ)
            for name, model in config.models.items()
            if model.upstream is not None
        }
        self._engines: dict[str, Engine] = {**self._remotes, **upstreams}
        self._snapshot = SnapshotHolder(Snapshot.of(config))
        self._emitter = Emitter(config.telemetry)
        self._pipeline = Pipeline(
            config,
            self._engines,
            revisions,
            RateLimits(self._store, config.redis.on_loss),
            ExactCache(self._store, config.cache.ttl_s, config.cache.max_answer_bytes),
            lambda: self._snapshot.current,
        )
        token_env = config.telemetry.metrics_token_env
        token = os.environ[token_env] if token_env else None
        self._samples = SampleLog(self._store, config)
        app = create_app(self._pipeline, config.gateway, self._emitter, self._missing, self._samples, token)
        self._server = _Server(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        board = SnapshotBoard(self._store, config)
        with contextlib.suppress(StoreAway):  # a release that was rolled back is not served again by a new gateway
            self._snapshot.take(await board.read())
        self._serving = asyncio.create_task(
            self._server.serve([shared_socket(config.gateway.host, config.gateway.port)])
        )
        self._was_ready = False
        self._tasks = [
            asyncio.create_task(self._discover()),
            asyncio.create_task(board.follow(self._snapshot)),
            asyncio.create_task(self._samples.run()),
            asyncio.create_task(registry.beat(self._store, lambda: registry.here(self._name))),
        ]

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        if self._serving.done() or any(task.done() for task in self._tasks):
            raise EngineUnavailable("A task of the gateway has ended.")

    async def drain(self) -> None:
        """Refuses new requests and waits for the running ones, at most `drain_timeout_s`."""
        self._pipeline.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.gateway.drain_timeout_s):
                while self._pipeline.inflight:
                    await asyncio.sleep(0.02)
                await self._pipeline.settled()

    async def __del__(self) -> None:
        """Called by Serve when the replica is to go."""
        if not hasattr(self, "_tasks"):  # it never came up
            return
        await self.drain()
        for listener in self._server.servers:
            listener.close()  # new connections go to the other gateways of the node
        await asyncio.sleep(LINGER_S)
        self._server.should_exit = True
        await self._serving
        for task in self._tasks:
            task.cancel()
        await self._samples.flush()
        await registry.leave(self._store, self._name)
        for engine in self._engines.values():
            await engine.close()
        await self._store.close()
        self._emitter.close()

    def _missing(self) -> str | None:
        """What /ready waits for. Once everything was there, one model's loss does not take the gateway out of service."""
        if self._was_ready:
            return None
        away = [name for name, remote in self._remotes.items() if not remote.ready]
        self._was_ready = not away
        return f"no replica of {', '.join(away)}" if away else None

    async def _discover(self) -> None:
        while True:
            try:
                members = await registry.members(self._store)
            except StoreAway:
                members = []
            for name, remote in self._remotes.items():
                await remote.refresh(Path(member.address) for member in members if member.model == name)
            await asyncio.sleep(DISCOVER_S)


class EvaluatorReplica:
    """The one process that judges what all the others did."""

    async def __init__(self, config: Config, place: Place) -> None:  # type: ignore[misc]  # Serve awaits it
        from gearshift.deployments.evaluator import WAIT_S, Evaluator  # statistics are for those who judge

        self._name = f"evaluator-{uuid.uuid4().hex[:8]}"
        self._store = place.store(config, timeout_s=registry.STALE_S)
        self._reading = place.store(config, timeout_s=registry.STALE_S + WAIT_S)
        self._emitter = Emitter(config.telemetry)
        self._evaluator = Evaluator(config, self._store, self._reading, self._emitter)
        self._tasks = [
            asyncio.create_task(self._evaluator.run()),
            asyncio.create_task(registry.beat(self._store, lambda: registry.here(self._name, registry.EVALUATOR))),
        ]

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        if any(task.done() for task in self._tasks):
            raise EngineUnavailable("A task of the evaluator has ended.")

    async def __del__(self) -> None:
        """Called by Serve when the replica is to go. Nothing is lost: what was not taken in waits in Redis."""
        if not hasattr(self, "_tasks"):
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await registry.leave(self._store, self._name)
        await self._reading.close()
        await self._store.close()
        self._emitter.close()


class _Server(uvicorn.Server):
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
