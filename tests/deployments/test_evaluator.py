"""The loop closed, without Ray: real gateway, real Redis, the evaluator beside them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest

from gearshift.deployments.control import SnapshotBoard
from gearshift.deployments.evaluator import Evaluator
from gearshift.deployments.report import alerts
from gearshift.eval import evidence as ev
from gearshift.eval.evidence import Arm, Evidence, Tally
from gearshift.eval.rollout import plan_of
from gearshift.platform import config_file
from gearshift.platform.cache.store import Store
from gearshift.platform.config import Config, Telemetry
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.errors import InvalidRequest
from gearshift.platform.samples import Exposure, Sample
from gearshift.platform.telemetry import Emitter

pytestmark = pytest.mark.anyio

EXTRA = """
evaluation: {feedback_ttl_s: 60}
"""
HALVES = "experiments: {manners: {arms: {large-v1: 1, large-v2: 1}, unit: %s, min_samples: 10}}"


def text_of(base: str, unit: str = "request", more: str = "") -> str:
    line = next(each for each in base.splitlines() if each.startswith("experiments:"))
    wanted = (HALVES % unit).replace("min_samples: 10", f"min_samples: 10{more}")
    return base.replace(line, wanted).replace("max_inflight: 4", "max_inflight: 64")


@asynccontextmanager
async def evaluator(store: Store, config: Config, running: bool = True) -> AsyncIterator[Evaluator]:
    reading = Store(store._listen_url, store.namespace, 5.0)
    found = Evaluator(config, store, reading, Emitter(Telemetry()))
    task = asyncio.create_task(found.run()) if running else None
    try:
        yield found
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await found.close()
        await reading.close()


async def ask(client: openai.AsyncOpenAI, n: int, model: str = "expensive", **more: Any) -> Any:
    return await client.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": f"Question number {n}, if you please"}], **more
    )


async def told(store: Store, count: int) -> None:
    """Until so many samples wait for the evaluator."""
    async with asyncio.timeout(15):
        while await store._call("XLEN", store.key("samples")) != count:
            await asyncio.sleep(0.01)


async def until(condition: Any) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


async def test_an_arm_that_users_dislike_is_rolled_back_by_itself(serve: Any, base_config: str, store: Store) -> None:
    text = text_of(base_config)
    config = config_file.parse(text + EXTRA)
    async with serve(text, EXTRA) as gateway, gateway.client() as client, evaluator(store, config) as judge:
        follower = asyncio.create_task(SnapshotBoard(store, config).follow(judge.holder))
        gateway.snapshot.append(await SnapshotBoard(store, config).open())
        seen = []
        async with httpx.AsyncClient(base_url=gateway.url, headers={"authorization": "Bearer gs-alice"}) as http:
            for n in range(120):
                raw = await ask(client, n)
                release = raw.headers["x-gearshift-release"]
                seen.append(release)
                body = {"request_id": raw.headers["x-request-id"], "thumbs": "up" if release == "large-v1" else "down"}
                answered = await http.post("/v1/feedback", json=body)
                assert (answered.status_code, answered.json()["counted"]) == (200, True)
                gateway.snapshot.append(judge.holder.current)
                if judge.holder.current.trials["manners"].status == "rolled back":
                    break
            await until(lambda: judge.holder.current.trials["manners"].status == "rolled back")
            gateway.snapshot.append(judge.holder.current)
            trial = judge.holder.current.trials["manners"]
            assert trial.weights == {"large-v1": 1.0}
            assert "feedback 0 against 1" in trial.why
            after = {(await ask(client, n)).headers["x-gearshift-release"] for n in range(300, 320)}
        assert after == {"large-v1"}
        log = await SnapshotBoard(store, config).changes()
        assert [(each.who, each.what) for each in log] == [("evaluator", "rolled back large-v2")]
        await until(lambda: "manners" in judge.state.decided)
        page = json.loads(judge.state.decided["manners"])
        assert (page["status"], page["arms"]["large-v2"]["weight"]) == ("running", 0.5)
        assert ["feedback", "large-v2"] in page["fallen"]
        assert judge.holder.current.generations == {"large-v2": 1}
        follower.cancel()


async def test_no_cached_answer_of_a_fallen_release_comes_back(serve: Any, base_config: str, store: Store) -> None:
    text = text_of(base_config)
    config = config_file.parse(text)
    async with serve(text) as gateway, gateway.client() as client:
        first = await ask(client, 1, "large-v2")
        await gateway.pipeline.settled()
        again = await ask(client, 1, "large-v2")
        gateway.snapshot.append(await SnapshotBoard(store, config).abort("manners", "me", "it is rude"))
        later = await ask(client, 1, "large-v2")
    assert [each.headers["x-gearshift-cache"] for each in (first, again, later)] == ["miss", "hit", "miss"]


async def test_hits_and_stand_ins_are_no_exposures_and_a_failed_arm_s_errors_are_seen(
    serve: Any, base_config: str, store: Store
) -> None:
    text = text_of(base_config).replace("large-v1: 1, large-v2: 1", "large-v2: 1")
    config = config_file.parse(text)

    always = "router: {threshold: -1}"
    async with (
        serve(text, always, large=EchoEngine(fail_after=0)) as gateway,
        gateway.client() as client,
        evaluator(store, config, False) as judge,
    ):
        gateway.snapshot.append(await judge._board.open())
        for n in range(3):
            raw = await ask(client, n, "auto")
            assert raw.headers["x-gearshift-tier"] == "cheap"
        await told(store, 6)
        await judge.step(0.1)
    arm = judge.state.evidence["manners"].arms["large-v2"]
    assert (arm.exposures, arm.tallies["error"].sum) == (3, 3.0)
    assert judge.state.releases["small-v1"]["error"].count == 3
    assert judge.state.releases["small-v1"]["error"].sum == 0


async def test_a_new_evaluator_goes_on_where_the_last_one_ended(serve: Any, base_config: str, store: Store) -> None:
    text = text_of(base_config, unit="user")
    config = config_file.parse(text)
    async with serve(text) as gateway, gateway.client() as client:
        board = SnapshotBoard(store, config)
        gateway.snapshot.append(await board.open())
        async with evaluator(store, config, False) as first, evaluator(store, config, False) as second:
            await second.load()
            for n in range(20):
                await ask(client, n, user=f"user-{n % 5}")
            await told(store, 20)
            assert await first.step(0.1) == 20
            for n in range(20, 30):
                await ask(client, n, user=f"user-{n % 5}")
            await told(store, 10)
            assert await second.step(0.1) == 0  # it had read the same samples: not taken in twice
            assert await second.step(0.1) == 10
            first._position = "0-0"
            await first.load()
            assert await first.step(0.01) == 0
        async with evaluator(store, config, False) as third:
            await third.load()
    for judge in (first, second, third):
        arms = judge.state.evidence["manners"].arms
        assert sum(arm.exposures for arm in arms.values()) == 30
        assert sum(arm.units for arm in arms.values()) == 5
    assert third._units == second._units
    assert (await store._call("XLEN", store.key("samples"))) == 0  # texts are gone once they are scored


async def test_what_was_seen_before_the_weights_moved_does_not_count(
    serve: Any, base_config: str, store: Store
) -> None:
    text = text_of(base_config)
    config = config_file.parse(text)
    async with serve(text) as gateway, gateway.client() as client, evaluator(store, config, False) as judge:
        board = SnapshotBoard(store, config)
        gateway.snapshot.append(await board.open())
        for n in range(10):
            await ask(client, n)
        gateway.snapshot.append(await board.set_weights("manners", {"large-v1": 9, "large-v2": 1}))
        for n in range(10, 15):
            await ask(client, n)
        await told(store, 15)
        await judge.step(0.1)
        assert sum(arm.exposures for arm in judge.state.evidence["manners"].arms.values()) == 5
        gateway.snapshot.append(gateway.snapshot[1])  # a gateway that has not heard yet
        await ask(client, 15)
        await told(store, 1)
        await judge.step(0.1)
    assert sum(arm.exposures for arm in judge.state.evidence["manners"].arms.values()) == 5


async def test_samples_wait_in_the_gateway_while_redis_is_away(serve: Any, base_config: str, store: Store) -> None:
    text = text_of(base_config)
    config = config_file.parse(text)
    async with serve(text) as gateway, gateway.client() as client, evaluator(store, config, False) as judge:
        gateway.snapshot.append(await judge._board.open())
        store._open_until = float("inf")
        await ask(client, 1)
        await asyncio.sleep(0.2)
        store._open_until = 0
        await told(store, 1)
        await judge.step(0.1)
    assert judge.state.taken == 1


async def test_feedback_is_refused_where_nobody_evaluates(serve: Any, base_config: str) -> None:
    async with serve(base_config, "evaluation: {enabled: false}") as gateway, gateway.client() as client:
        raw = await ask(client, 1, "cheap")
        body = {"request_id": raw.headers["x-request-id"], "thumbs": "up"}
        async with httpx.AsyncClient(base_url=gateway.url, headers={"authorization": "Bearer gs-alice"}) as http:
            said = await http.post("/v1/feedback", json=body)
    assert (said.status_code, said.json()["error"]["code"]) == (400, "invalid_value")
    assert "without an evaluator" in said.json()["error"]["message"]


async def test_feedback_is_for_one_s_own_requests_and_counts_once(serve: Any, base_config: str, store: Store) -> None:
    text = text_of(base_config)
    async with serve(text) as gateway, gateway.client() as client, httpx.AsyncClient(base_url=gateway.url) as http:
        raw = await ask(client, 1, "cheap")
        request_id = raw.headers["x-request-id"]

        async def give(key: str, **body: Any) -> httpx.Response:
            return await http.post("/v1/feedback", json=body, headers={"authorization": f"Bearer {key}"})

        other = await give("gs-bob", request_id=request_id, thumbs="up")
        unknown = await give("gs-alice", request_id="req_0000000000", thumbs="up")
        nobody = await give("gs-nobody", request_id=request_id, thumbs="up")
        first = await give("gs-alice", request_id=raw.parse().id, rating=4, comment="fine")
        second = await give("gs-alice", request_id=request_id, thumbs="down")
        wrong = [
            await give("gs-alice", request_id=request_id),
            await give("gs-alice", request_id=request_id, thumbs="up", rating=3),
            await give("gs-alice", request_id=request_id, rating=6),
            await give("gs-alice", request_id=request_id, thumb="up"),
            await give("gs-alice", thumbs="up"),
        ]
    assert (other.status_code, unknown.status_code, nobody.status_code) == (404, 404, 401)
    assert (first.json()["counted"], second.json()["counted"]) == (True, False)
    assert [each.status_code for each in wrong] == [400] * 5
    assert [each.json()["error"]["param"] for each in wrong[2:]] == ["rating", "thumb", "request_id"]


async def test_no_text_goes_to_redis_when_the_config_says_so(serve: Any, base_config: str, store: Store) -> None:
    text = text_of(base_config)
    async with serve(text, "evaluation: {text_chars: 0}") as gateway, gateway.client() as client:
        await ask(client, 7)
        await told(store, 1)
        entries = await store.stream_after(store.key("samples"), "0-0", 10, 0.1)
    assert len(entries) == 1
    assert b"number 7" not in entries[0][1][b"s"]


async def test_a_person_can_pause_go_on_and_abort(store: Store, base_config: str) -> None:
    text = text_of(base_config, more=", rollout: {stages: [5, 50, 100]}")
    board = SnapshotBoard(store, config_file.parse(text))
    await board.open()
    assert (await board.pause("manners", True, "ann", "lunch")).trials["manners"].status == "paused"
    assert (await board.pause("manners", False)).trials["manners"].status == "running"
    assert (await board.advance("manners")).trials["manners"].weights["large-v2"] == 0.5
    assert (await board.advance("manners")).trials["manners"].status == "completed"
    with pytest.raises(InvalidRequest, match="no next stage"):
        await board.advance("manners")
    assert (await board.abort("manners", "bob", "no")).trials["manners"].weights == {"large-v1": 1.0}
    assert [change.what for change in await board.changes()] == [
        "paused", "resumed", "stage 50 %", "stage 100 %", "rolled back",
    ]  # fmt: skip


async def test_what_is_left_to_a_person_is_noted_once(store: Store, base_config: str) -> None:
    text = text_of(base_config, more=", on_worse: alert")
    async with evaluator(store, config_file.parse(text), False) as judge:
        judge.holder.take(await judge._board.open())
        period = judge.holder.current.trials["manners"].period
        sums = {"large-v1": 95.0, "large-v2": 40.0}
        arms = {
            name: Arm(100, 100, {"feedback": Tally(count=100, sum=good, squares=good)}) for name, good in sums.items()
        }
        judge.state.evidence["manners"] = Evidence(period, arms)
        for _ in range(3):
            await judge._decide()
        assert judge.holder.current.trials["manners"].status == "running"
        noted = await judge._board.changes()
    assert [(each.who, each.what) for each in noted] == [("evaluator", "worse: large-v2")]
    assert "feedback 0.4 against 0.95" in noted[0].why


async def test_a_release_that_drifts_is_an_alert_until_it_is_well_again(store: Store, base_config: str) -> None:
    async with evaluator(store, config_file.parse(text_of(base_config)), False) as judge:
        judge.holder.take(await judge._board.open())

        def answers(count: int, bad: int) -> None:
            for n in range(count):
                text = "" if n < bad else "A whole answer."
                judge._take(Sample(request_id=f"r{n}", release="small-v1", answer=text, has_text=True))

        answers(1000, 20)
        assert judge.state.drift["small-v1"] == {}
        answers(500, 200)
        await judge._decide()
        assert list(judge.state.drift["small-v1"]) == ["valid", "empty"]
        noted = await judge._board.changes()
        assert [(each.experiment, each.what) for each in noted] == [("small-v1", "drift")]
        assert alerts({}, {}, {}, judge.state.drift)[0].startswith("release small-v1 has drifted: valid 0.6")
        answers(500, 10)
        assert alerts({}, {}, {}, judge.state.drift) == []


async def test_the_time_when_only_the_baseline_served_narrows_what_comes_after(store: Store, base_config: str) -> None:
    text = text_of(base_config, "user", ", metrics: [cost], guards: {}").replace("large-v2: 1", "large-v2: 0")
    config = config_file.parse(text)
    board = SnapshotBoard(store, config)

    async def asked(rounds: int, arms: int, seed: int) -> None:
        period = (await board.read()).trials["manners"].period
        rng = random.Random(seed)
        for n in range(rounds):
            user = n % 40
            exposure = Exposure("manners", f"large-v{1 + user % arms}", period, f"user-{user}")
            cost = 1.0 + user % 7 + rng.random()
            sample = Sample(request_id=f"r{n}", release=exposure.arm, exposures=(exposure,), cost_dollars=cost)
            await store._call("XADD", store.key("samples"), "*", "s", msgspec.msgpack.encode(sample))

    await board.open()
    async with evaluator(store, config, False) as judge:
        judge.holder.take(await board.read())
        await judge.load()
        await asked(400, 1, 1)
        await judge.step(0.1)
        await board.set_weights("manners", {"large-v1": 1, "large-v2": 1})
        await asked(200, 2, 2)
        await judge.step(0.1)
        evidence = judge.state.evidence["manners"]
        first = ev.compare(plan_of(config.experiments["manners"]), evidence)
        assert first[0].explained > 0.8
    async with evaluator(store, config, False) as later:  # another process, after the first has ended
        later.holder.take(await board.read())
        await later.load()
        await asked(200, 2, 3)
        await later.step(0.1)
        again = ev.compare(plan_of(config.experiments["manners"]), later.state.evidence["manners"])
    assert again[0].explained > 0.8
    width = [each[0].interval.high - each[0].interval.low for each in (first, again)]
    assert width[1] < width[0]
