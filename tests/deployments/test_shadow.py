"""Arms that nobody sees, the judge of their answers, and canaries: real gateway, real Redis, the evaluator beside them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gearshift.deployments.canaries import Canaries
from gearshift.deployments.control import SnapshotBoard
from gearshift.deployments.evaluator import Evaluator
from gearshift.deployments.judge import Judge
from gearshift.deployments.prober import Prober
from gearshift.eval.evidence import Arm
from gearshift.eval.pairs import LabelledPair, agreement_with, judged, markdown, preferred
from gearshift.eval.suite import Asker, Graded
from gearshift.platform import config_file
from gearshift.platform.cache.store import Store
from gearshift.platform.config import Telemetry
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.errors import ConfigError
from gearshift.platform.request import Delta, Message, Request
from gearshift.platform.telemetry import SHADOWS, Emitter

pytestmark = pytest.mark.anyio

EXPERIMENT = "experiments: {manners: {arms: {large-v1: 1, large-v2: 0}, shadow: 1, unit: request, min_samples: 10%s}}"
JUDGE = "evaluation: {judge: {release: small-v1, price: {input: 1000000, output: 0}%s}}"


def text_of(base: str, more: str = "", model: str = "large") -> str:
    line = next(each for each in base.splitlines() if each.startswith("experiments:"))
    text = base.replace(line, EXPERIMENT % more).replace("max_inflight: 4", "max_inflight: 64")
    return text.replace("large: {echo: {}}}", "large: {echo: {}}, other: {echo: {}}}").replace(
        "large-v2: {model: large", f"large-v2: {{model: {model}"
    )


class Scripted(EchoEngine):
    """Says what a function of the last message says, and remembers what it was asked."""

    def __init__(self, says: Any) -> None:
        super().__init__()
        self._says = says
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.asked.append(request)
        said = Message("user", self._says(request.messages[-1].content))
        echoed = Request(request.id, (said,), request.sampling, request.tenant)
        async with aclosing(super().generate(echoed)) as deltas:
            async for delta in deltas:
                yield delta


def critic(question: str) -> str:
    """Prefers the answer that says please."""
    first, second = (re.search(rf"<answer_{name}>(.*)</answer_{name}>", question, re.S) for name in "AB")
    assert first
    assert second
    polite = ["please" in found[1] for found in (first, second)]
    return "tie" if polite[0] == polite[1] else "A" if polite[0] else "B"


@asynccontextmanager
async def beside(gateway: Any, store: Store, text: str, running: bool = True) -> AsyncIterator[Evaluator]:
    config = config_file.parse(text)
    reading = Store(store._listen_url, store.namespace, 5.0)
    found = Evaluator(config, store, reading, Emitter(Telemetry()), Prober(gateway.pipeline))
    gateway.snapshot.append(await SnapshotBoard(store, config).open())
    found.holder.take(gateway.snapshot[-1])
    task = asyncio.create_task(found.run()) if running else None
    try:
        yield found
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await found.close()
        await reading.close()


async def ask(client: Any, *numbers: int) -> set[str]:
    seen = set()
    for n in numbers:
        messages = [{"role": "user", "content": f"Question number {n}, if you please"}]
        raw = await client.chat.completions.with_raw_response.create(model="expensive", messages=messages)
        seen.add(raw.headers["x-gearshift-release"])
    return seen


async def until(condition: Any) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


def arm(judge: Evaluator, name: str = "large-v2") -> Arm:
    evidence = judge.state.evidence.get("manners")
    return evidence.arms.get(name, Arm()) if evidence else Arm()


async def test_an_arm_in_the_shadow_is_asked_as_batch_work_and_seen_by_nobody(
    serve: Any, base_config: str, store: Store
) -> None:
    text, other = text_of(base_config, model="other"), Scripted(str.upper)
    async with (
        serve(text, other=other) as gateway,
        gateway.client() as client,
        beside(gateway, store, text) as judge,
    ):
        assert await ask(client, *range(10)) == {"large-v1"}
        await until(lambda: arm(judge).shadows == 10)
        assert (arm(judge).exposures, arm(judge, "large-v1").exposures, arm(judge, "large-v1").shadows) == (0, 10, 0)
        assert arm(judge).tallies["valid"].mean == 1.0
        assert arm(judge).tallies["ttft_p95"].count == 0
        assert {each.service for each in other.asked} == {"batch"}
        assert [each.role for each in other.asked[0].messages] == ["system", "user"]
        await gateway.pipeline.settled()
        await ask(client, 3)  # from the cache
        await ask(client, 11)
        await until(lambda: arm(judge).shadows == 11)
        trial, evidence = judge.holder.current.trials["manners"], judge.state.evidence["manners"]
        page = judge._page("manners", trial, evidence, [])
    assert len(other.asked) == 11
    assert (page["mismatch"], page["arms"]["large-v2"]["shadows"]) == (None, 11)


async def test_a_candidate_that_breaks_in_the_shadow_falls_before_anybody_has_met_it(
    serve: Any, base_config: str, store: Store
) -> None:
    text = text_of(base_config, ", rollout: {stages: [shadow, 50, 100], min_samples: 1000}", "other")
    async with (
        serve(text, other=EchoEngine(fail_after=1)) as gateway,
        gateway.client() as client,
        beside(gateway, store, text) as judge,
    ):
        for n in range(100):
            assert await ask(client, n) == {"large-v1"}
            gateway.snapshot.append(judge.holder.current)
            if judge.holder.current.trials["manners"].status == "rolled back":
                break
        await until(lambda: judge.holder.current.trials["manners"].status == "rolled back")
        assert "error 1 against 0" in judge.holder.current.trials["manners"].why


async def test_a_candidate_that_does_well_in_the_shadow_comes_to_light(
    serve: Any, base_config: str, store: Store
) -> None:
    text = text_of(base_config, ", rollout: {stages: [shadow, 50, 100], min_samples: 12, min_time_s: 0}")
    async with serve(text) as gateway, gateway.client() as client, beside(gateway, store, text) as judge:
        assert await ask(client, *range(11)) == {"large-v1"}
        told = "1 more answers in the shadow of large-v2"
        await until(lambda: "manners" in judge.decisions and judge.decisions["manners"].why == told)
        assert arm(judge).shadows == 11
        await ask(client, 12)
        await until(lambda: judge.holder.current.trials["manners"].stage == 1)
        log = await judge._board.changes()
    assert [(each.what, each.why) for each in log] == [
        ("stage 50 %", "12 answers in the shadow, no guard is worse"),
    ]


async def test_shadows_beyond_the_bound_are_left_out(serve: Any, base_config: str, store: Store) -> None:
    left_out = SHADOWS.labels("manners", "large-v2", "left out")._value
    before = left_out.get()
    text = text_of(base_config, model="other")
    extra = "evaluation: {max_shadows: 2}"
    async with serve(text, extra, other=EchoEngine(delay_s=60)) as gateway, gateway.client() as client:
        assert await ask(client, *range(5)) == {"large-v1"}
        await until(lambda: gateway.pipeline.hidden == 2)
        assert left_out.get() - before == 3
    assert not gateway.pipeline.in_use


async def test_the_judge_s_word_is_a_measure_within_the_day_s_cap(serve: Any, base_config: str, store: Store) -> None:
    # the client's answer repeats the question, which says please; the shadow's does not
    text = text_of(base_config, ", metrics: [preferred], guards: {preferred: 0.1}", "other")
    text += JUDGE % ", max_pairs_per_day: 25"
    small = Scripted(critic)
    async with (
        serve(text, other=Scripted(lambda said: "No."), small=small) as gateway,
        gateway.client() as client,
        beside(gateway, store, text) as judge,
    ):
        await ask(client, *range(40))
        await until(lambda: judge.holder.current.trials["manners"].status == "rolled back")
        await until(lambda: sum(judge.state.judged.values()) == 40)
        assert "preferred 0 against 0.5 (margin 0.1)" in judge.holder.current.trials["manners"].why
        assert judge.state.judged == {"lost": 25, "over the cap": 15}
    assert len(small.asked) == 50
    assert not any("large" in each.messages[-1].content for each in small.asked)
    assert {each.service for each in small.asked} == {"batch"}


async def test_a_pair_counts_once_though_two_judges_had_it(serve: Any, base_config: str, store: Store) -> None:
    text = text_of(base_config, ", metrics: [preferred], guards: {}", "other") + JUDGE % ", max_cost_per_day: 1000"
    async with (
        serve(text, other=Scripted(lambda said: "No."), small=Scripted(critic)) as gateway,
        gateway.client() as client,
        beside(gateway, store, text, running=False) as judge,
    ):
        await ask(client, 1, 2)
        async with asyncio.timeout(15):
            while judge.state.taken < 4:
                await judge.step(0.1)
        worker = Judge(config_file.parse(text), store, Prober(gateway.pipeline))
        both = await asyncio.gather(worker.step(), worker.step())  # both take the same pair, and one of them was faster
        assert all(both)
        assert await worker.step()
        assert not await worker.step()
        spent = await store.hash_all(next(iter(await keys(store, "judge:*"))))
        assert spent["pairs"] == b"2"
        assert float(spent["dollars"]) > 0
        async with asyncio.timeout(15):
            while judge.state.taken < 6:
                await judge.step(0.1)
        assert judge.state.judged == {"lost": 2}


async def keys(store: Store, pattern: str) -> list[str]:
    return [key.decode() for key in await store._call("KEYS", store.key(pattern))]


async def test_a_release_that_answers_canaries_otherwise_than_before_is_an_alert(
    serve: Any, base_config: str, store: Store, tmp_path: Path
) -> None:
    file = tmp_path / "canaries.jsonl"
    rows = [{"id": f"c{n}", "question": f"Say {n}", "kind": "exact", "answers": [f"SAY {n}"]} for n in range(5)]
    rows += [{"id": f"s{n}", "question": f"Sing {n}"} for n in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = text_of(base_config, model="other") + f"evaluation: {{canaries: {{file: {file}, every_s: 60}}}}"
    says: list[Any] = [str.upper]
    async with (
        serve(text, other=Scripted(lambda said: says[-1](said))) as gateway,
        beside(gateway, store, text, running=False) as judge,
    ):
        starting = Canaries(config_file.parse(text), store, Prober(gateway.pipeline, lambda: ["other"]))
        assert await starting.look("large-v2", 900.0) is None
        canaries = Canaries(config_file.parse(text), store, Prober(gateway.pipeline))
        first = await canaries.look("large-v2", 1000.0)
        assert first is not None
        assert (sum(first.last.values()), first.worse) == (10, "")
        assert await canaries.look("large-v2", 1030.0) is None
        assert await canaries.look("large-v2", 1060.0) is not None
        says.append(lambda said: said[::-1])
        third = await canaries.look("large-v2", 1120.0)
        assert third is not None
        assert third.worse == "10 of 10 canaries lost and 0 won: c0, c1, c2, c3, c4, …"
        await judge.step(0.1)
        assert judge.state.releases["large-v2"]["canary"].mean == pytest.approx(2 / 3)
        await judge._report()
        page = json.loads((await store.hash_all(store.key("evaluator")))["report"])
        assert page["alerts"] == [f"release large-v2: {third.worse}"]
        assert page["canaries"]["large-v2"]["well"] == 0
        says.append(str.upper)
        fourth = await canaries.look("large-v2", 1180.0)
        assert fourth is not None
        assert fourth.worse == ""


async def test_canaries_of_a_file_that_is_none_are_an_error(base_config: str, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "canaries.jsonl"
    file.write_text('{"id": "a", "question": "x"}\n{"id": "a", "question": "y"}\n')
    text = base_config + f"evaluation: {{canaries: {{file: {file}}}}}"
    prober: Any = None
    with pytest.raises(ConfigError, match="'a' is there twice"):
        Canaries(config_file.parse(text), store, prober)


async def test_who_gets_which_threshold_is_an_experiment_too(serve: Any, base_config: str, store: Store) -> None:
    line = next(each for each in base_config.splitlines() if each.startswith("experiments:"))
    split = (
        "experiments: {manners: {arms: {large-v1: 1}}, "
        "limit: {arms: {low: 1, high: 1}, thresholds: {low: -1, high: 1}, unit: user, min_samples: 5}}\n"
        "router: {experiment: limit}"
    )
    text = base_config.replace(line, split)
    async with serve(text) as gateway, gateway.client() as client, beside(gateway, store, text) as judge:
        tiers: dict[str, set[str]] = {}
        for n in range(24):
            messages = [{"role": "user", "content": f"Is {n} even?"}]
            raw = await client.chat.completions.with_raw_response.create(
                model="auto", messages=messages, safety_identifier=f"user-{n % 8}"
            )
            tiers.setdefault(f"user-{n % 8}", set()).add(raw.headers["x-gearshift-tier"])
        assert all(len(each) == 1 for each in tiers.values())
        assert set.union(*tiers.values()) == {"cheap", "expensive"}
        await until(lambda: judge.state.taken == 24)
        arms = judge.state.evidence["limit"].arms
        assert sum(each.exposures for each in arms.values()) == 24
        assert arms["low"].tallies["cost"].mean > arms["high"].tallies["cost"].mean


async def test_a_judge_s_agreement_with_people_is_measured_over_the_api(serve: Any, tmp_path: Path) -> None:
    text = """
models: {small: {echo: {}}}
prompts: {none: {}}
policies: {none: {}}
releases: {critic: {model: small, prompt: none, policy: none}}
tiers: {cheap: {release: critic}}
tenants: {dev: {open: true}}
"""
    labels = [
        LabelledPair("1", "How?", "So, please", "So", "a"),
        LabelledPair("2", "How?", "So", "So, please", "b"),
        LabelledPair("3", "How?", "So", "So, please", "a"),
        LabelledPair("4", "How?", "So", "Thus", "tie"),
        LabelledPair("5", "How?", "So", "So", "tie"),
    ]
    async with serve(text, small=Scripted(critic)) as gateway:
        asker = Asker(gateway.url, None, tmp_path, 16, 4)
        asked = [(each.question, each.a, each.b) for each in labels]
        told = await asyncio.to_thread(judged, asker, "critic", asked, lambda *_: None)
    assert [each.label for each in told] == ["won", "lost", "lost", "tie", "same"]
    found = agreement_with(labels, told)
    assert (found.share[1], found.decided) == (0.8, 3)
    assert found.agreed[1] == pytest.approx(2 / 3)
    runs = [Graded("r", "", (), right) for right in ((True, True, False, True, True), (False, False, True, True, True))]
    section = preferred(told, runs)
    assert section["preferred"][1] == pytest.approx((1 + 0 + 0 + 0.5 + 0.5) / 5)
    assert section["agreement"]["agreed"][1] == pytest.approx(2 / 3)
    assert "it took a side on 3, and the right one on 66.7%" in markdown("critic", section)
