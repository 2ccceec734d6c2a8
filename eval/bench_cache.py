"""`gearshift bench cache`: what an answer from the cache costs, beside a bare route that reads a value from the same Redis."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from gearshift.eval.bench import Bar, Report, collect
from gearshift.eval.bench_gateway import wait_for_route
from gearshift.eval.load import Load, run
from gearshift.platform.weights.source import Progress

CLIENTS = (1, 32)
MOST_P50, LEAST_RATE, LEAST_FASTER = 2.0, 0.4, 20.0
TOKENS, EQUAL = 64, 100
BARE = """
import json, sys, redis.asyncio, uvicorn
from fastapi import FastAPI, Request, Response
app, store = FastAPI(), redis.asyncio.Redis.from_url(sys.argv[2])
@app.get("/up")
async def up():
    return await store.ping()
@app.post("/answer")
async def answer(request: Request):
    json.loads(await request.body())
    return Response(await store.get(sys.argv[3]), media_type="application/json")
uvicorn.run(app, port=int(sys.argv[1]), log_level="critical", access_log=False)
"""


@dataclass(frozen=True, slots=True)
class Target:
    """A running deployment whose answers are cached: its chat URL, an API key, its Redis, and a key there for the bare route."""

    url: str
    key: str
    redis_url: str
    value_key: str


class BareRoute:
    """A route that hands a value of Redis over, in a process of its own."""

    def __init__(self, target: Target) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._process = subprocess.Popen([sys.executable, "-c", BARE, str(port), target.redis_url, target.value_key])
        self.url = f"http://127.0.0.1:{port}"
        wait_for_route(self._process, f"{self.url}/up")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def bench_cache(target: Target, repeats: int, requests: int, report: Report, progress: Progress) -> None:
    """Fills the report; everything but the bare route goes through the whole path."""
    bare = BareRoute(target)
    try:
        asyncio.run(_once(target, bare, requests // 10, -1))
        runs = []
        for number in range(repeats):
            progress("measuring", number, repeats)
            runs.append(asyncio.run(_once(target, bare, requests, number)))
    finally:
        bare.close()
    progress("measuring", repeats, repeats)
    _tell(runs, report)


def bench_flights(target: Target, repeats: int, report: Report) -> None:
    """Adds to the report how many generations equal requests cost."""
    asyncio.run(_flights(target, repeats, report))


async def _once(target: Target, bare: BareRoute, requests: int, number: int) -> dict[tuple[str, int], Load]:
    found: dict[tuple[str, int], Load] = {}
    for clients in CLIENTS:
        count = requests if clients > 1 else requests // 4
        found["bare", clients] = await run(f"{bare.url}/answer", lambda _: _chat("same"), count, clients, [])
        found["hit", clients] = await run(target.url, lambda _: _chat("same"), count, clients, [], target.key)
    nonce = f"{os.getpid()}-{number}"
    found["generated", 1] = await run(target.url, lambda n: _chat(f"{nonce}-{n}"), 3, 1, [], target.key)
    return found


def _tell(runs: Sequence[dict[tuple[str, int], Load]], report: Report) -> None:
    for clients in CLIENTS:
        label = "1 client" if clients == 1 else f"{clients} clients"
        pairs = [(each["bare", clients], each["hit", clients]) for each in runs]
        for kind, place in (("bare", 0), ("hit", 1)):
            report.results.append(collect(f"{kind}, {label}", "ms p50", [pair[place].p50_ms for pair in pairs]))
            report.results.append(collect(f"{kind}, {label}", "requests/s", [pair[place].per_second for pair in pairs]))
        slower = [hit.p50_ms / bare.p50_ms for bare, hit in pairs]
        rate = [hit.per_second / bare.per_second for bare, hit in pairs]
        report.results += [
            collect(f"p50 over bare, {label}", "", slower),
            collect(f"rate over bare, {label}", "", rate),
        ]
        if (
            clients == 1
        ):  # of more, which keep all cores busy, it is how long the queue is: the rate once more, upside down
            report.bars.append(Bar(f"p50 over bare, {label}", statistics.median(slower), MOST_P50, "max"))
        report.bars.append(Bar(f"requests/s over bare, {label}", statistics.median(rate), LEAST_RATE, "min"))
    faster = [each["generated", 1].p50_ms / each["hit", 1].p50_ms for each in runs]
    report.results.append(collect(f"generating {TOKENS} tokens over a hit", "", faster))
    report.bars.append(Bar(f"generating {TOKENS} tokens over a hit", statistics.median(faster), LEAST_FASTER, "min"))


async def _flights(target: Target, repeats: int, report: Report) -> None:
    """Equal requests at once, over connections of their own, so that all gateways get some."""
    generated = []
    for number in range(repeats):
        body = _chat(f"{os.getpid()} equal {number}")
        headers = {"content-type": "application/json", "authorization": f"Bearer {target.key}"}

        async def one(body: bytes = body, headers: dict[str, str] = headers) -> str:
            async with (
                aiohttp.ClientSession() as session,
                session.post(target.url, data=body, headers=headers) as answer,
            ):
                await answer.read()
                return answer.headers["x-gearshift-cache"] if answer.status == 200 else str(answer.status)

        parts = Counter(await asyncio.gather(*(one() for _ in range(EQUAL))))
        generated.append(float(EQUAL - parts["shared"] - parts["hit"]))
    report.results.append(collect(f"{EQUAL} equal requests at once", "generations", generated))
    report.bars.append(Bar(f"generations of {EQUAL} equal requests", max(generated), 1.0, "max"))


def _chat(text: str) -> bytes:
    words = [{"role": "user", "content": f"Tell me about the number {text}."}]
    fields: dict[str, Any] = {"model": "only", "max_completion_tokens": TOKENS, "ignore_eos": True}
    return json.dumps({"messages": words, **fields}).encode()
