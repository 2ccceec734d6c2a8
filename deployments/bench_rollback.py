"""How long a bad release goes on serving once it is known to be bad, on a running deployment of two gateways."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from gearshift.deployments.bench import free_ports
from gearshift.deployments.control import SnapshotBoard
from gearshift.deployments.serve import Deployment
from gearshift.eval.bench import Bar, Report, collect
from gearshift.platform import config_file
from gearshift.platform.config import Config
from gearshift.platform.weights.source import Progress

CLIENTS = 24
WORDS = 30
MIN_SAMPLES = 30
STEP_S = 0.02
AFTER_S = 2.0
TIMEOUT_S = 60.0

CONFIG = """
models: {{echo: {{echo: {{delay_s: {step_s}}}, max_queued_requests: 512}}}}
prompts: {{good: {{}}, bad: {{system: Be rude.}}}}
policies: {{none: {{}}}}
releases:
  good: {{model: echo, prompt: good, policy: none, sampling: {{temperature: 0}}}}
  bad: {{model: echo, prompt: bad, policy: none, sampling: {{temperature: 0}}}}
experiments: {{manners: {{arms: {{good: 1, bad: 1}}, unit: request, min_samples: {min_samples}}}}}
tiers: {{only: {{experiment: manners}}}}
tenants: {{bench: {{open: true}}}}
gateway: {{port: {port}, replicas: 2, max_inflight: 1024}}
admin: {{port: {admin_port}}}
"""


@dataclass(slots=True)
class Seen:
    """What the clients saw. Times are seconds since 1970."""

    answered: list[tuple[float, str]] = field(default_factory=list)
    """When an answer began, and which release gave it."""
    told: dict[str, list[float]] = field(default_factory=lambda: {"good": [], "bad": []})
    """When feedback was taken, by release."""
    failed: int = 0
    truncated: int = 0


def run_rollback_bench(repeats: int, report: Report, progress: Progress) -> None:
    """Fills the report. Streams of both releases are running all the time; users like one and dislike the other."""
    port, admin_port = free_ports(2)
    config = config_file.parse(CONFIG.format(step_s=STEP_S, min_samples=MIN_SAMPLES, port=port, admin_port=admin_port))
    deployment = Deployment(config, progress)
    try:
        found = asyncio.run(_measure(config, deployment, repeats, progress))
    finally:
        deployment.close()
    delays, needed, streams, lost, hits = zip(*found, strict=True)
    add = report.results.append
    add(collect("roll back: from the deciding observation to the last answer of the bad release", "ms", delays))
    add(collect("roll back: answers of the bad release before it", "requests", needed))
    add(collect("roll back: streams alive all the time", "", streams))
    report.bars.append(Bar("roll back: slowest, s", max(delays) / 1000, 1.0, "max"))
    report.bars.append(Bar("roll back: streams failed or truncated", sum(lost), 0, "max"))
    report.bars.append(Bar("roll back: cached answers of the bad release served afterwards", sum(hits), 0, "max"))


async def _measure(
    config: Config, deployment: Deployment, repeats: int, progress: Progress
) -> list[tuple[float, float, float, float, float]]:
    store = deployment.place.store(5.0)
    board = SnapshotBoard(store, config)
    found = []
    async with httpx.AsyncClient(base_url=deployment.url, timeout=60, limits=httpx.Limits(max_connections=200)) as http:
        for repeat in range(repeats):
            progress("roll backs", repeat, repeats)
            if repeat:
                await board.set_weights("manners", {"good": 1, "bad": 1}, "bench", "once more")
                await asyncio.sleep(0.5)
            found.append(await _once(board, http, repeat))
        progress("roll backs", repeats, repeats)
    await store.close()
    return found


async def _once(board: SnapshotBoard, http: httpx.AsyncClient, repeat: int) -> tuple[float, float, float, float, float]:
    seen, before = Seen(), len(await board.changes())
    async with _clients(http, seen, repeat):
        await _rolled_back(board, before)
        await asyncio.sleep(AFTER_S)
    bad = [at for at, release in seen.answered if release == "bad"]
    # all on one arm and none on the other is beyond doubt as soon as there are enough of both
    deciding = max(sorted(times)[MIN_SAMPLES - 1] for times in seen.told.values())
    late = max(0.0, max(bad) - deciding)
    again = await http.post("/v1/chat/completions", json=_body("bad", repeat, 0, 0, stream=False))
    hit = float(again.headers["x-gearshift-cache"] == "hit")
    return 1000 * late, len(bad), CLIENTS, seen.failed + seen.truncated, hit


async def _rolled_back(board: SnapshotBoard, before: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if len(await board.changes()) > before:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _clients(http: httpx.AsyncClient, seen: Seen, repeat: int) -> AsyncIterator[None]:
    """Each asks one thing after the other; at the end all finish what they have begun."""
    stop = asyncio.Event()

    async def run(client: int) -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            await _ask(http, seen, _body("only", repeat, client, number, stream=True))

    tasks = [asyncio.create_task(run(client)) for client in range(CLIENTS)]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)


def _body(model: str, repeat: int, client: int, number: int, stream: bool) -> dict[str, object]:
    words = " ".join(f"w{repeat}.{client}.{number}.{place}" for place in range(WORDS))
    return {"model": model, "messages": [{"role": "user", "content": words}], "stream": stream}


async def _ask(http: httpx.AsyncClient, seen: Seen, body: dict[str, object]) -> None:
    text, ended = "", False
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            seen.failed += 1
            return
        release = answer.headers["x-gearshift-release"]
        seen.answered.append((time.time(), release))
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                ended = True
            elif data:
                text += json.loads(data)["choices"][0]["delta"].get("content") or ""
    asked = body["messages"][0]["content"]  # type: ignore[index]
    seen.truncated += not ended or text.strip() != asked
    thumbs = "up" if release == "good" else "down"
    told = await http.post("/v1/feedback", json={"request_id": answer.headers["x-request-id"], "thumbs": thumbs})
    seen.told[release].append(time.time())
    seen.failed += told.status_code != 200
