"""The whole request path in one process, without Ray: the real app, a real Redis, EchoEngines, and a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import uvicorn

from gearshift.deployments.gateway import create_app
from gearshift.deployments.guards import Embed, Name
from gearshift.deployments.pipeline import Pipeline
from gearshift.deployments.replicas import QuietServer, shared_socket
from gearshift.deployments.reviews import Reviews
from gearshift.deployments.samples import SampleLog
from gearshift.deployments.shadow import Shadows
from gearshift.platform import config_file
from gearshift.platform.cache.exact import ExactCache
from gearshift.platform.cache.flight import Flights
from gearshift.platform.cache.limits import RateLimits
from gearshift.platform.cache.store import Store
from gearshift.platform.config import Config
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.engine.protocol import Engine
from gearshift.platform.telemetry import Emitter
from gearshift.platform.tenants import hash_key
from gearshift.router.arms import Snapshot

ALICE, BOB = "gs-alice", "gs-bob"

TEXT = f"""
models: {{small: {{echo: {{}}}}, large: {{echo: {{}}}}}}
prompts: {{none: {{}}, polite: {{system: Be polite.}}}}
policies:
  standard:
    rules: [{{rule: email}}, {{rule: card}}, {{rule: blocklist, action: block, terms: [forbidden words]}}]
releases:
  small-v1: {{model: small, prompt: none, policy: standard, sampling: {{temperature: 0}}}}
  large-v1: {{model: large, prompt: none, policy: standard, sampling: {{temperature: 0}}}}
  large-v2: {{model: large, prompt: polite, policy: standard, sampling: {{temperature: 0}}}}
experiments: {{manners: {{arms: {{large-v1: 1, large-v2: 0}}}}}}
tiers:
  cheap: {{release: small-v1, price: {{input: 1, output: 2}}}}
  expensive: {{experiment: manners, price: {{input: 10, output: 20}}}}
tenants:
  alice: {{keys: ["{hash_key(ALICE)}"]}}
  bob: {{keys: ["{hash_key(BOB)}"], models: [cheap], limits: {{requests_per_minute: 2, tokens_per_minute: 10000}}}}
gateway: {{max_inflight: 4, request_timeout_s: 5, max_body_bytes: 10000}}
"""


@dataclass
class Gateway:
    """A gateway on a port of its own, with its insides in reach."""

    url: str
    pipeline: Pipeline
    engines: Mapping[str, EchoEngine]
    snapshot: list[Snapshot] = field(default_factory=list)

    def client(self, key: str = ALICE) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def base_config() -> str:
    return TEXT


Serve = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def serve(store: Store, anyio_backend: str) -> Serve:
    """`async with serve(small=EchoEngine(...)) as gateway`; engines that are not given echo at once."""

    @asynccontextmanager
    async def running(
        text: str = TEXT, extra: str = "", embed: Embed | None = None, name: Name | None = None, **given: Engine
    ) -> AsyncIterator[Gateway]:
        config: Config = config_file.parse(text + extra)
        engines: dict[str, Any] = {name: given.get(name) or EchoEngine() for name in config.models}
        snapshot = [Snapshot.of(config)]
        pipeline = Pipeline(
            config,
            engines,
            dict.fromkeys(config.models, "echo"),
            RateLimits(store, "allow"),
            Flights(store, ExactCache(store, 60, 100_000)),
            lambda: snapshot[-1],
            embed,
            name,
            Reviews(store, 60),
        )
        token = "sesame" if config.telemetry.metrics_token_env else None
        samples = SampleLog(store, config)
        shadows = Shadows(samples)
        telling = asyncio.create_task(samples.run())
        app = create_app(
            lambda: pipeline, config.gateway, Emitter(config.telemetry), lambda: None, samples, shadows, token
        )
        listener = shared_socket("127.0.0.1", 0)
        server = QuietServer(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield Gateway(f"http://127.0.0.1:{listener.getsockname()[1]}", pipeline, engines, snapshot)
        finally:
            server.should_exit = True
            await task
            await shadows.close()
            telling.cancel()
            await pipeline.settled()

    return running
