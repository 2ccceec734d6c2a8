"""A deployment on a real cluster of three Ray nodes: spread over them, reached over the network, and still there when nodes,
the head, Redis or the process that steers it are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from nodes import Nodes, cluster, interrupt, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PORT, ADMIN_PORT = 8420, 8421
CONFIG = """
models:
  m: {{echo: {{delay_s: 0.02}}, replicas: 2, max_replicas_per_node: 1, resources: {{engine: 1}}}}
prompts: {{none: {{}}}}
policies: {{none: {{}}}}
releases: {{r: {{model: m, prompt: none, policy: none, sampling: {{temperature: 0}}}}}}
tiers: {{only: {{release: r}}}}
tenants: {{dev: {{open: true}}}}
cache: {{mode: "off"}}
redis: {{url: "{redis}"}}
gateway: {{port: {port}, replicas: 2, max_replicas_per_node: 1}}
admin: {{port: {admin_port}}}
"""
WORDS = " ".join(f"w{n}" for n in range(100))


class Steered:
    """`gearshift serve --address`, and what it says of itself."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self._nodes = nodes
        self._folder = folder
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        path, log = self._folder / "config.yaml", self._folder / f"serve-{time.monotonic_ns()}.log"
        self.log = log
        path.write_text(CONFIG.format(redis=self._nodes.redis_url, port=PORT, admin_port=ADMIN_PORT))
        command = [sys.executable, "-m", "gearshift", "serve", str(path), "--address", self._nodes.address]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=self._nodes.environ, start_new_session=True
            )
        wait_for(lambda: "Ready on" in log.read_text() or self.process.poll() is not None, 120)
        assert self.process.poll() is None, log.read_text()
        return self.process

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"http://127.0.0.1:{ADMIN_PORT}/admin/status", timeout=5).json()
        return found

    def whole(self) -> bool:
        try:
            found = self.status()
        except httpx.HTTPError:
            return False
        return [len(found[kind]) for kind in ("gateways", "engines", "evaluators")] == [2, 2, 1]


@contextmanager
def streams() -> Iterator[Counter[str]]:
    """Clients that stream all the time, and how their requests ended."""
    done, ends = threading.Event(), Counter[str]()

    def client() -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0) as asking:
            while not done.is_set():
                ends[ask(asking)] += 1

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield ends
    finally:
        done.set()
        for thread in threads:
            thread.join(60)


def ask(client: openai.OpenAI) -> str:
    try:
        stream = client.chat.completions.create(
            model="only", messages=[{"role": "user", "content": WORDS}], stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    except (openai.APIConnectionError, httpx.TransportError):
        return "connection"
    except openai.APIError as error:
        return str(error.code)
    return "whole" if text == WORDS else f"wrong: {text}"


def test_a_deployment_outlives_nodes_the_head_redis_and_whoever_steers_it(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, '{"engine": 1}') as nodes:
        steered = Steered(nodes, tmp_path)
        found = steered.status()
        assert {engine["node"] for engine in found["engines"]} == set(nodes.addresses[1:])
        assert len({gateway["node"] for gateway in found["gateways"]}) == 2
        assert [node["alive"] for node in found["nodes"]] == [True] * 3

        with streams() as ends:
            wait_for(lambda: ends["whole"] >= 8)
            pids = {each["pid"] for kind in ("gateways", "engines") for each in found[kind]}
            os.kill(steered.process.pid, signal.SIGKILL)  # serving goes on, and whoever comes next takes it over
            steered.process.wait()
            before = ends["whole"]
            wait_for(lambda: ends["whole"] > before + 8)
        assert set(ends) == {"whole"}
        steered.start()
        found = steered.status()
        assert {each["pid"] for kind in ("gateways", "engines") for each in found[kind]} == pids
        assert found["revision"] == 1

        with streams() as ends:
            nodes.kill_redis()
            before = ends["whole"]
            wait_for(lambda: ends["whole"] > before + 8)
            nodes.start_redis()
            wait_for(steered.whole)
        assert set(ends) == {"whole"}

        with streams() as ends:
            wait_for(lambda: ends["whole"] >= 4)
            nodes.kill(2)
            wait_for(lambda: len(steered.status()["engines"]) == 1, 30)
            before = ends["whole"]
            wait_for(lambda: ends["whole"] > before + 8)
            nodes.start(2)
            wait_for(steered.whole, 120)
        assert set(ends) <= {"whole", "connection"}  # of those that came in by the gateway of that node
        assert ends["connection"] <= 4

        with streams() as ends:
            wait_for(lambda: ends["whole"] >= 4)
            nodes.kill(0)
            before = ends["whole"]
            wait_for(lambda: ends["whole"] > before + 8)
            nodes.start(0)
            wait_for(steered.whole, 120)
            wait_for(lambda: len(steered.log.read_text().split("Ready on")) == 3, 120)  # it has joined again
            wait_for(steered.whole, 120)
        assert set(ends) <= {"whole", "connection"}
        interrupt(steered.process)
        assert steered.process.returncode == 0, steered.log.read_text()
