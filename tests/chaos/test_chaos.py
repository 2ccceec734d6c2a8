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
from typing import Any

import httpx
import psutil
import pytest

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


@dataclass
class Served:
    url: str
    admin: str
    process: subprocess.Popen[bytes]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.admin}/admin/status", timeout=5).json()
        return found

    def whole(self, gone: int = 0) -> bool:
        """Everything that the config asks for is there, without the one that is gone, and answers."""
        try:
            found = self.status()
            pids = [[each["pid"] for each in found[kind]] for kind in ("gateways", "engines", "evaluators")]
            counts = [len(each) for each in pids]
            return (
                counts == [2, 2, 1] and not any(gone in each for each in pids) and ask(self.url, QUESTIONS[0])[1] == ""
            )
        except (httpx.HTTPError, KeyError, ValueError):
            return False


@dataclass
class Seen:
    """What the clients got: ends of requests by kind, wrong texts, by the fault in whose time they fell."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    begun: int = 0


def ask(url: str, question: str) -> tuple[str, str]:
    """The text of a streamed answer, and how it ended when it did not end well."""
    body = {
        "model": "only",
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
def load(served: Served, expected: dict[str, str]) -> Iterator[list[Seen]]:
    """Clients that ask all the time; what they see goes into the last of the list."""
    stop, seen = threading.Event(), [Seen()]

    def client(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            question, mine = rng.choice(QUESTIONS), seen[-1]
            mine.begun += 1
            text, end = ask(served.url, question)
            mine.ends[end or "answered"] += 1
            if not end and text != expected[question]:
                mine.wrong.append(f"{question}: {text!r}")
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


def victim(served: Served, fault: str) -> int:
    status = served.status()
    members = {"engine": "engines", "gateway": "gateways", "evaluator": "evaluators"}
    if fault in members:
        return int(status[members[fault]][0]["pid"])
    name = {"controller": "ray::ServeController", "redis": "valkey-server"}[fault]
    children = psutil.Process(served.process.pid).children(recursive=True)
    everybody = [*children, *(each for each in psutil.process_iter() if each not in children)]
    return next(each.pid for each in everybody if name in " ".join(cmdline(each)) and mine(each, served))


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def mine(process: psutil.Process, served: Served) -> bool:
    """Ray starts its processes in sessions of their own, but leaves them our children."""
    try:
        return served.process.pid in [each.pid for each in process.parents()]
    except psutil.Error:
        return False


def start(folder: Path) -> Served:
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(port=ports[0], admin_port=ports[1]))
    with (folder / "serve.log").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "gearshift", "serve", str(path)],
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    served = Served(f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}", process)
    assert eventually(served.whole, 600) is not None, (folder / "serve.log").read_text()
    return served


def eventually(condition: Any, timeout_s: float) -> float | None:
    """The seconds it took, or None."""
    begun = time.monotonic()
    while time.monotonic() - begun < timeout_s:
        if condition():
            return time.monotonic() - begun
        time.sleep(0.1)
    return None


def test_every_request_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, lines = random.Random(SEED), [f"seed {SEED}, {SECONDS:g} s"]
    faults = ["engine", "gateway", "evaluator", "controller", "redis"]
    served = start(tmp_path)
    try:
        expected = {question: ask(served.url, question)[0] for question in QUESTIONS}
        assert all(expected.values())
        begun, done = time.monotonic(), list[str]()
        with load(served, expected) as seen:
            while time.monotonic() - begun < SECONDS:
                fault = rng.choice([each for each in faults if each not in done[-2:]])
                done.append(fault)
                seen.append(Seen())
                gone = victim(served, fault)
                os.kill(gone, signal.SIGKILL)
                back = eventually(partial(served.whole, gone), RECOVERY_S)
                assert back is not None, f"{fault}: not whole again; {served.status()}"
                time.sleep(rng.uniform(0, PAUSE_S))
                lines.append(f"{fault:10} whole again after {back:5.1f} s; {dict(seen[-1].ends)}")
        for fault, following, each in zip(["", *done], [*done, ""], seen, strict=True):
            assert not each.wrong, f"{fault}: {each.wrong[:3]}"
            assert sum(each.ends.values()) == each.begun
            allowed = CLEAN | {"answered"} | ({GATEWAY_GONE} if "gateway" in (fault, following) else set())
            assert set(each.ends) <= allowed, f"{fault}: {each.ends}"
        assert eventually(lambda: all(not e["kv_blocks_used"] for e in served.status()["engines"]), 30) is not None
        assert all(engine["running"] == engine["waiting"] == 0 for engine in served.status()["engines"])
    finally:
        children = psutil.Process(served.process.pid).children(recursive=True)
        served.process.send_signal(signal.SIGINT)
        served.process.wait(120)
        _, alive = psutil.wait_procs(children, timeout=30)
        for process in alive:
            process.kill()
        with capsys.disabled():
            sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert not alive
