"""`gearshift bench gateway`: what the path of a request costs, with an engine that costs nothing, beside a bare route.

The bare route is FastAPI under uvicorn and answers with the same bytes. Both are measured in turn, in one run.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

from gearshift.eval.bench import Bar, Report, collect
from gearshift.eval.load import Body, Load, idle_cpu_ms_per_second, run
from gearshift.platform.weights.source import Progress

STREAM_TOKENS = 100
BARS_MS = {"request": 2.2, "cache hit": 0.8, "streamed token": 0.15}
CLIENTS = (1, 32)
IDLE_S = 3.0

BARE = """
import asyncio, json, sys, uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
app = FastAPI()
ANSWER, CHUNK, TOKENS, DELAY = sys.argv[2].encode(), sys.argv[3].encode(), int(sys.argv[4]), float(sys.argv[5])
@app.post("/answer")
async def answer(request: Request):
    json.loads(await request.body())
    return Response(ANSWER, media_type="application/json")
@app.post("/stream")
async def stream(request: Request):
    json.loads(await request.body())
    async def events():
        for _ in range(TOKENS):
            await asyncio.sleep(DELAY)
            yield CHUNK
    return StreamingResponse(events(), media_type="text/event-stream")
uvicorn.run(app, port=int(sys.argv[1]), log_level="critical", access_log=False)
"""


@dataclass(frozen=True, slots=True)
class Target:
    """A running deployment: its chat URL, an API key, and the processes of the path (gateways, engines, Redis)."""

    url: str
    key: str
    pids: Sequence[int]


class BareRoute:
    """The floor: a route that does nothing, in a process of its own."""

    def __init__(self, delay_s: float) -> None:
        answer, chunk = _sample_answer(), "data: " + _sample_answer() + "\n\n"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = [str(port), answer, chunk, str(STREAM_TOKENS), str(delay_s)]
        self._process = subprocess.Popen([sys.executable, "-c", BARE, *arguments])
        self.pid = self._process.pid
        self.url = f"http://127.0.0.1:{port}"
        self._wait()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _wait(self) -> None:
        wait_for_route(self._process, f"{self.url}/openapi.json")


def wait_for_route(process: subprocess.Popen[bytes], url: str) -> None:
    """Ends the process and raises `RuntimeError` when it does not answer."""
    for _ in range(200):
        try:
            urlopen(url, timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    process.terminate()
    process.wait()
    raise RuntimeError("the bare route did not start")


def bench_gateway(target: Target, step_s: float, repeats: int, requests: int, progress: Progress) -> Report:
    """Runs all measurements `repeats` times after a warm-up. `step_s` is the engine's time between tokens of a stream.

    The bars are held at the larger number of clients. At one client every process sleeps between two events and is woken
    for each, which costs the bare route as much, and the idle work of a second is spread over few requests.
    """
    bare = BareRoute(step_s)
    try:
        asyncio.run(_once(target, bare, requests // 10, -1))
        runs, idle = [], []
        for number in range(repeats):
            progress("measuring", number, repeats)
            idle.append(idle_cpu_ms_per_second(target.pids, IDLE_S))
            runs.append(asyncio.run(_once(target, bare, requests, number)))
        progress("measuring", repeats, repeats)
    finally:
        bare.close()
    report = Report("gateway", [collect("idle, all processes of the path", "CPU ms/s", idle)])
    for clients in CLIENTS:
        for kind in ("bare", "request", "cache hit"):
            loads = [measured[kind, clients] for measured in runs]
            _add_requests(report, f"{kind}, {_clients(clients)}", loads)
        added = [(m["request", clients].p50_ms - m["bare", clients].p50_ms) for m in runs]
        report.results.append(collect(f"added to the bare route, {_clients(clients)}", "ms p50", added))
        for kind in ("bare stream", "stream"):
            loads = [measured[kind, clients] for measured in runs]
            per_token = [load.cpu_ms_per_request / STREAM_TOKENS for load in loads]
            report.results.append(collect(f"{kind}, {_clients(clients)}", "CPU ms/token", per_token))
    medians = {f"{result.name} {result.unit}": result.median for result in report.results}
    many = _clients(max(CLIENTS))
    for kind, unit, bar in (
        ("request", "CPU ms/request", "request"),
        ("cache hit", "CPU ms/request", "cache hit"),
        ("stream", "CPU ms/token", "streamed token"),
    ):
        value = medians[f"{kind}, {many} {unit}"]
        report.bars.append(Bar(f"CPU ms a {bar}, {many}", value, BARS_MS[bar], "max"))
    return report


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def _add_requests(report: Report, name: str, loads: Sequence[Load]) -> None:
    report.results.append(collect(name, "CPU ms/request", [load.cpu_ms_per_request for load in loads]))
    report.results.append(collect(name, "requests/s", [load.per_second for load in loads]))
    report.results.append(collect(name, "ms p50", [load.p50_ms for load in loads]))
    report.results.append(collect(name, "ms p99", [load.p99_ms for load in loads]))


async def _once(target: Target, bare: BareRoute, requests: int, number: int) -> dict[tuple[str, int], Load]:
    found: dict[tuple[str, int], Load] = {}
    for clients in CLIENTS:
        count = requests if clients > 1 else requests // 4
        streams = 2 * clients if clients > 1 else 4
        nonce = f"{os.getpid()}-{number}-{clients}"
        chats: dict[str, tuple[Body, int]] = {
            "request": (_unique(nonce), count),
            "cache hit": (_same, count),
            "stream": (_streamed(nonce), streams),
        }
        found["bare", clients] = await run(f"{bare.url}/answer", _same, count, clients, [bare.pid])
        found["bare stream", clients] = await run(f"{bare.url}/stream", _same, streams, clients, [bare.pid])
        for kind, (body, many) in chats.items():
            found[kind, clients] = await run(target.url, body, many, clients, target.pids, target.key)
    return found


def _chat(text: str, model: str = "cheap", **fields: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], **fields}).encode()


def _same(_: int) -> bytes:
    return _chat("What is the capital of France, and since when has it been?")


def _unique(nonce: str) -> Body:
    return lambda n: _chat(f"What is the capital of France, and since when has it been? {nonce} {n}")


def _streamed(nonce: str) -> Body:
    return lambda n: _chat(
        f"All work and no play makes {nonce}-{n} a dull boy.",
        model="expensive",
        stream=True,
        max_completion_tokens=STREAM_TOKENS,
        ignore_eos=True,
    )


def _sample_answer() -> str:
    message = {"role": "assistant", "content": "What is the capital of France, and since when has it been?"}
    return json.dumps({"id": "chatcmpl-0", "object": "chat.completion", "choices": [{"index": 0, "message": message}]})
