"""Starts what a bench measures, and hands it over: the measuring itself is the business of eval/."""

from __future__ import annotations

import asyncio
import socket

import redis.asyncio

from gearshift.deployments import registry
from gearshift.deployments.serve import Deployment
from gearshift.eval.bench import Report
from gearshift.eval.bench_gateway import Target, bench_gateway
from gearshift.platform import config_file
from gearshift.platform.config import Config
from gearshift.platform.weights.source import Progress

STEP_S = 0.02

CONFIG = """
models:
  instant: {{echo: {{}}}}
  stepping: {{echo: {{delay_s: {step_s}}}}}
prompts: {{none: {{}}}}
policies:
  all:
    rules: [{{rule: secrets}}, {{rule: email}}, {{rule: card}}, {{rule: blocklist, action: block, terms: [forbidden words]}}]
releases:
  instant: {{model: instant, prompt: none, policy: all, sampling: {{temperature: 0}}}}
  stepping: {{model: stepping, prompt: none, policy: all, sampling: {{temperature: 0}}}}
tiers:
  cheap: {{release: instant}}
  expensive: {{release: stepping}}
tenants:
  bench:
    keys: ["{key_hash}"]
    limits: {{requests_per_minute: 100000000, tokens_per_minute: 10000000000}}
gateway: {{port: {port}, max_inflight: 1024}}
admin: {{port: {admin_port}}}
"""


def run_gateway_bench(repeats: int, requests: int, progress: Progress) -> Report:
    """With key check, limits, exact cache and rules on; the engines echo, one at once and one in steps of 20 ms."""
    from gearshift.platform.tenants import hash_key, new_key

    key = new_key()
    port, admin_port = free_ports(2)
    text = CONFIG.format(step_s=STEP_S, key_hash=hash_key(key), port=port, admin_port=admin_port)
    config = config_file.parse(text)
    deployment = Deployment(config, progress)
    try:
        pids = asyncio.run(_path_pids(config, deployment))
        target = Target(f"{deployment.url}/v1/chat/completions", key, pids)
        return bench_gateway(target, STEP_S, repeats, requests, progress)
    finally:
        deployment.close()


async def _path_pids(config: Config, deployment: Deployment) -> list[int]:
    """Gateways, engines and Redis: every process that a request passes through."""
    store = deployment.place.store()
    members = await registry.members(store)
    await store.close()
    client = redis.asyncio.Redis.from_url(deployment.place.redis_url)
    server = await client.info("server")
    await client.aclose()
    return [*(member.pid for member in members), server["process_id"]]


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
