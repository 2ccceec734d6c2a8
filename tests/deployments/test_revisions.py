"""Applied configs: what a plan says, who may write, and that a revision serves whole or not at all, whoever dies when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gearshift.deployments.admin import before
from gearshift.deployments.plan import engine_key, plan
from gearshift.deployments.registry import members
from gearshift.deployments.revisions import Revision, Revisions, dumped
from gearshift.platform import config_file
from gearshift.platform.cache.embedded import EmbeddedRedis
from gearshift.platform.cache.store import Store
from gearshift.platform.errors import Conflict, NotFound

pytestmark = pytest.mark.anyio

TEXT = """
models: {m: {echo: {}}}
prompts: {p: {}}
policies: {none: {}}
releases: {r: {model: m, prompt: p, policy: none, sampling: {temperature: 0}}}
tiers: {only: {release: r}}
tenants: {dev: {open: true}}
"""
OLD = config_file.parse(TEXT)
KIND = config_file.parse(TEXT.replace("{p: {}}", "{p: {version: 2, system: Be kind.}}"))
SLOW = config_file.parse(TEXT.replace("{echo: {}}", "{echo: {delay_s: 0.01}, replicas: 2}"))


def test_a_plan_says_in_words_what_changes_starts_and_is_lost() -> None:
    kind = plan(OLD, KIND)
    assert kind.changes == ("prompts.p.version: 1 becomes 2", 'prompts.p.system: "" becomes "Be kind."')
    assert (kind.starts, kind.stops) == ((), ())
    assert kind.caches == ("r: cached answers are left behind, as it would answer differently now",)
    slow = plan(OLD, SLOW)
    assert slow.starts == (engine_key(SLOW, "m"),)
    assert slow.stops == (engine_key(OLD, "m"),)
    assert plan(OLD, OLD).empty
    assert plan(None, OLD).starts == (engine_key(OLD, "m"),)


def test_more_replicas_are_the_same_engine() -> None:
    more = config_file.parse(TEXT.replace("{echo: {}}", "{echo: {}, replicas: 3}"))
    assert engine_key(more, "m") == engine_key(OLD, "m")
    assert plan(OLD, more).changes == ("models.m.replicas: 1 becomes 3",)
    assert plan(OLD, more).caches == ()


def test_a_plan_tells_what_becomes_of_experiments_and_what_needs_a_restart() -> None:
    both = TEXT.replace("releases: {", "releases: {q: {model: m, prompt: p, policy: none}, ")
    one = config_file.parse(both.replace("release: r", "experiment: x") + "experiments: {x: {arms: {r: 1, q: 0}}}")
    two = config_file.parse(
        both.replace("release: r", "experiment: x") + "experiments: {x: {arms: {r: 1, q: 1}}, y: {arms: {r: 1}}}"
    )
    assert plan(one, two).experiments == (
        "x: goes on with the weights it has; `gearshift experiment set` moves them",
        "y: begins",
    )
    assert plan(two, one).experiments[-1] == "y: ends"
    other = config_file.parse(dumped(two).decode().replace('"top_p":1.0', '"top_p":0.5'))
    assert plan(two, other).experiments[0] == "x: begins anew, as r and q changed"
    moved = config_file.parse(TEXT + "gateway: {port: 9}")
    assert plan(OLD, moved).refused == ("gateway.port: 8000 becomes 9",)


async def test_revisions_are_kept_and_two_operators_can_t_overwrite_each_other(store: Store) -> None:
    revisions = Revisions(store)
    first = await revisions.begin(OLD, 0, "ann", "first", "serve")
    with pytest.raises(Conflict, match="being applied"):
        await revisions.begin(KIND, 0, "bob", "", "apply")
    await revisions.activate(1, {"m": "echo"})
    await revisions.finish(1)
    results = await asyncio.gather(
        *(revisions.begin(KIND, 1, f"operator {n}", "", "apply") for n in range(5)), return_exceptions=True
    )
    begun = [result for result in results if isinstance(result, Revision)]
    assert len(begun) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 4
    await revisions.undo(1, "no room")
    head = await revisions.head()
    assert (head.serving, head.settled, head.outcome, head.problem) == (1, True, "undone", "no room")
    with pytest.raises(Conflict, match="planned against 7"):
        await revisions.begin(KIND, 7, "bob", "", "apply")
    assert [each.number for each in await revisions.all()] == [1, 2]
    assert (await revisions.get(1)).parsed() == OLD
    assert first.who == "ann"
    with pytest.raises(NotFound, match="the last one is 2"):
        await revisions.get(3)


def test_a_roll_back_goes_to_the_one_before_and_further_when_asked_again() -> None:
    def revision(number: int, config: Any, of: int = 0) -> Revision:
        return Revision(number, 0.0, "", "", "rollback" if of else "apply", dumped(config), of)

    history = [revision(1, OLD), revision(2, KIND), revision(3, SLOW)]
    assert before(history, 3) == 2
    history.append(revision(4, KIND, of=2))
    assert before(history, 4) == 1


SCRIPT = """
import os, sys, time
from pathlib import Path
from gearshift.deployments.serve import Deployment
from gearshift.platform import config_file
step = sys.argv[2]
deployment = Deployment(config_file.load(Path(sys.argv[1])), who="test", on_step=lambda at: os._exit(70) if at == step else None)
print("READY", flush=True)
until = time.monotonic() + 400
while time.monotonic() < until and not os.path.exists(sys.argv[3]):
    deployment.watch()
    time.sleep(0.05)
deployment.drain()
deployment.close()
"""
STEPS = ("begun", "prepared", "activated", "taken over", "finished", "retired")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(config: Path, step: str, stop: Path) -> Iterator[subprocess.Popen[str]]:
    """A deployment that dies after the step; none of its processes outlives this."""
    folder = tempfile.mkdtemp(prefix="gs-")  # what dies in the middle leaves its files behind
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(config), step, str(stop)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": folder},
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) and "READY" not in line:
        pass
    assert line, "it did not start"
    family = psutil.Process(process.pid).children(recursive=True)
    try:
        yield process
    finally:
        stop.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)
        process.kill()
        stop.unlink()
        _, alive = psutil.wait_procs(family, timeout=3)  # some agents of Ray stay behind for a while after a crash
        for each in alive:
            each.kill()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def served_by(url: str) -> set[str]:
    """What all the gateways answer with."""
    body = {"model": "only", "messages": [{"role": "user", "content": "hello"}]}
    headers = {"cache-control": "no-store"}
    answers = [httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=20) for _ in range(12)]
    return {f"{each.json()['usage']['prompt_tokens']} {each.json()['system_fingerprint']}" for each in answers}


@pytest.mark.slow
@pytest.mark.e2e
async def test_whoever_dies_when_one_whole_revision_serves(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    """The controller is killed after each step, of an apply and of a roll back in turn (both go the same way); what starts
    next finds it half done."""
    port, namespace = free_port(), f"crash-{time.time_ns()}"
    shared = f"""
gateway: {{port: {port}, replicas: 2}}
admin: {{port: {free_port()}}}
redis: {{url: "{redis_server.url}", namespace: {namespace}}}
"""
    file, stop = tmp_path / "config.yaml", tmp_path / "stop"
    file.write_text(TEXT + shared)
    old = config_file.load(file)
    new = config_file.parse(
        TEXT.replace("{p: {}}", "{p: {version: 2, system: Be kind.}}").replace("{echo: {}}", "{echo: {delay_s: 0.001}}")
        + shared
    )
    url, wanted = f"http://127.0.0.1:{port}", dumped(old)
    ends: list[str] = []
    for step in STEPS:
        with running(file, step, stop) as process:
            store = Store(redis_server.url, namespace, 5.0)
            revisions = Revisions(store)
            head = await revisions.head()
            assert head.settled
            assert head.active == head.serving
            serving = await revisions.get(head.serving)
            assert serving.config == wanted, f"after a crash, {ends[-1:]} serves half"
            assert len(found := served_by(url)) == 1
            assert found.pop().split()[0] == ("1" if serving.config == dumped(old) else "3")
            if serving.config == dumped(old):
                await revisions.begin(new, head.serving, "test", step, "apply")
            else:
                await revisions.begin(old, head.serving, "test", step, "rollback", of=1)
            wanted = dumped(new) if serving.config == dumped(old) else dumped(old)
            assert process.wait(120) == 70
            ends.append(step)
            await store.close()
    with running(file, "never", stop):
        store = Store(redis_server.url, namespace, 5.0)
        head, known = await Revisions(store).head(), await Revisions(store).all()
        await store.close()
        assert (head.serving, head.settled, len(known)) == (7, True, 7)
        assert known[6].config == wanted
        assert len(served_by(url)) == 1


@pytest.mark.slow
@pytest.mark.e2e
async def test_a_revision_that_can_t_start_is_undone_and_streams_live_through_one_that_can(
    tmp_path: Path, redis_server: EmbeddedRedis
) -> None:
    port, namespace = free_port(), f"apply-{time.time_ns()}"
    shared = f"""
gateway: {{port: {port}, replicas: 2}}
admin: {{port: {free_port()}}}
redis: {{url: "{redis_server.url}", namespace: {namespace}}}
"""
    text = TEXT.replace("{echo: {}}", "{echo: {delay_s: 0.02}, max_queued_requests: 256}")
    file, stop = tmp_path / "config.yaml", tmp_path / "stop"
    file.write_text(text + shared)
    (tmp_path / "empty").mkdir()
    broken = config_file.parse(text.replace("{m: {", f'{{n: {{source: "{tmp_path}/empty"}}, m: {{') + shared)
    faster = config_file.parse(
        text.replace("delay_s: 0.02", "delay_s: 0.015").replace("{p: {}}", "{p: {system: Be kind.}}") + shared
    )
    wider = config_file.parse(faster.model_dump_json().replace('"replicas":1', '"replicas":3', 1))
    asked = '{delay_s: 0.01}, max_queued_requests: 256, warm_up: [{ask: Say hi, expect: "no"}]}'
    wrong = config_file.parse(text.replace("{delay_s: 0.02}, max_queued_requests: 256}", asked) + shared)
    url, words = f"http://127.0.0.1:{port}", " ".join(f"w{n}" for n in range(60))
    done = False

    def client(number: int) -> tuple[int, int]:
        """Streams begun and streams that came whole."""
        begun = whole = 0
        with httpx.Client(base_url=url, timeout=60) as http:
            while not done:
                body = {
                    "model": "only",
                    "stream": True,
                    "messages": [{"role": "user", "content": f"{words} {number} {begun}"}],
                }
                begun += 1
                with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
                if answer.status_code == 200 and lines[-1] == "[DONE]":
                    pieces = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
                    whole += "".join(pieces).strip() == body["messages"][0]["content"]  # type: ignore[index]
        return begun, whole

    with running(file, "never", stop), ThreadPoolExecutor(8) as pool:
        store = Store(redis_server.url, namespace, 5.0)
        revisions = Revisions(store)
        clients = [pool.submit(client, number) for number in range(8)]
        try:
            stood: list[set[int]] = []
            for config, outcome, serving in (
                (broken, "undone", 1),
                (wrong, "undone", 1),
                (faster, "applied", 4),
                (wider, "applied", 5),
                (faster, "applied", 6),
            ):
                await revisions.begin(config, (await revisions.head()).serving, "test", "", "apply")
                async with asyncio.timeout(180):
                    while not (await revisions.head()).settled:
                        await asyncio.sleep(0.05)
                head = await revisions.head()
                assert (head.outcome, head.serving, head.active) == (outcome, serving, serving)
                assert bool(head.problem) == (outcome == "undone")
                if config is wrong:
                    assert (
                        "answers its warm-up question 'Say hi' with 'Say hi', which does not contain 'no'"
                        in head.problem
                    )
                stood.append(await pids(store, engine_key(faster, "m")))
            async with asyncio.timeout(60):
                while len(left := await pids(store, engine_key(faster, "m"))) > 1:
                    await asyncio.sleep(0.1)
            await asyncio.sleep(2)
        finally:
            done = True
        counts = await asyncio.gather(*(asyncio.wrap_future(each) for each in clients))
        await store.close()
    assert sum(begun for begun, _ in counts) > 20
    assert all(begun == whole for begun, whole in counts)
    assert (len(stood[2]), len(stood[3])) == (1, 3)
    assert stood[3] > stood[2]  # more replicas beside the one that stays
    assert left < stood[3]


async def pids(store: Store, key: str) -> set[int]:
    return {each.pid for each in await members(store) if each.model == key}
