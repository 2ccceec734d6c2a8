"""From answers to a scorer, a calibration and a report; and logged requests through another policy."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gearshift.eval import answered, graders, jsonl, replayed, routing
from gearshift.eval.answered import Answered, Question, TierAnswer
from gearshift.platform import config_file
from gearshift.platform.errors import ConfigError
from gearshift.router import artefact
from gearshift.router.calibration import Calibration, Target
from gearshift.router.features import Query
from gearshift.router.learned import Kind
from gearshift.router.router import Router


def world(rows: int = 600, seed: int = 0) -> list[Answered]:
    """The cheap tier can talk, and knows when it is wrong; it can't add."""
    rng, found = np.random.default_rng(seed), []
    for number in range(rows):
        adds = number % 3 == 0
        weak = float(rng.random() < (0.1 if adds else 0.9))
        logprobs = tuple(map(float, rng.normal(-0.1 if weak else -1.0, 0.05, 12)))
        cheap = TierAnswer(weak, 1.0, "words of an answer", logprobs, tuple(-value for value in logprobs))
        tiers = {"cheap": cheap, "expensive": TierAnswer(float(rng.random() < 0.95), 5.0)}
        padding = "x" * int(rng.integers(1, 300))  # so that no two score the same
        text = f"What is {number} + {number * 7}? {padding}" if adds else f"Tell me about thing {number}. {padding}"
        found.append(Answered(text, tiers, id=str(number), split="test" if number % 4 == 0 else "train"))
    return found


def trained(folder: Path, kind: Kind = "tfidf") -> artefact.Artefact:
    return routing.train_scorer(
        routing.split(world(), "train"), kind, folder / f"{kind}.safetensors", "a made-up world"
    )


def test_a_scorer_and_a_judge_save_what_they_promise_on_rows_they_have_not_seen(tmp_path: Path) -> None:
    scorer, judge = trained(tmp_path), trained(tmp_path, "answer")
    assert scorer.card.metrics["APGR"] > 0.7
    train, test = (routing.split(world(), name) for name in ("train", "test"))
    saved = []
    for read in (None, judge):
        made = routing.calibrated(train, scorer, read, Target(quality=0.9), "", None)
        told = routing.summary(routing.rows_of(test, scorer, read, None), made)
        assert told.quality.value >= 0.9
        assert made.saving.low - 0.1 <= told.saving.value
        saved.append(told.saving.value)
    assert saved[0] > 0.3


def test_rows_of_the_training_are_scored_by_those_who_have_not_seen_them(tmp_path: Path) -> None:
    noise = [
        Answered(f"word{n} other{n * 7}", {"a": TierAnswer(float(n * 7919 % 2)), "b": TierAnswer(1.0)})
        for n in range(200)
    ]
    made = routing.train_scorer(noise, "tfidf", tmp_path / "a.safetensors", "")
    assert abs(np.corrcoef(routing.gains_on(noise, made), answered.qualities(noise)[:, 0])[0, 1]) < 0.3


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (Target(expensive_share=0.25), lambda c: c.expensive_share == pytest.approx(0.25, abs=0.01)),
        (Target(dollars_per_1000=2000), lambda c: c.saving.value == pytest.approx(0.6, abs=0.01)),
        (Target(quality=1.0), lambda c: c.quality_bound >= 0.97),
    ],
)
def test_each_target_is_met(tmp_path: Path, target: Target, told: Any) -> None:
    rows = routing.split(world(), "train")
    made = routing.calibrated(rows, trained(tmp_path), None, target, "", None)
    assert told(made)
    made.write(tmp_path / "c.yaml")
    assert Calibration.read(tmp_path / "c.yaml") == made


def test_targets_that_can_not_be_met_and_answers_that_teach_nothing(tmp_path: Path) -> None:
    scorer, rows = trained(tmp_path), routing.split(world(), "train")
    with pytest.raises(ConfigError, match="cheap tier alone"):
        routing.calibrated(rows, scorer, None, Target(dollars_per_1000=10), "", None)
    with pytest.raises(ConfigError, match="trained for the tiers cheap, expensive"):
        routing.gains_on([Answered("q", {"a": TierAnswer(1.0), "b": TierAnswer(1.0)})], scorer)
    with pytest.raises(ConfigError, match="one tier alone"):
        answered.tier_names([Answered("q", {"a": TierAnswer(1.0)})])
    differ = [Answered("q", {"a": TierAnswer(1.0), other: TierAnswer(1.0)}) for other in "bc"]
    with pytest.raises(ConfigError, match="row 2 has answers of a, c"):
        answered.tier_names(differ)
    (tmp_path / "bad.jsonl").write_text('{"query": "q", "tiers": {}}\n{"quary": 1}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2: .*quary"):
        jsonl.read(tmp_path / "bad.jsonl", Answered)


@pytest.mark.parametrize(
    ("kind", "answer", "accepted", "right"),
    [
        ("number", "3 + 4 is 7.", ["7"], True),
        ("number", "It is 1,200 in all", ["1200"], True),
        ("number", "7 and then 8", ["7"], False),
        ("number", "seven", ["7"], False),
        ("choice", "The answer is (B).", ["B"], True),
        ("choice", "B. copper", ["B"], True),
        ("choice", "A dog is what it is. The correct choice is C", ["C"], True),
        ("choice", "none of them", ["A"], False),
        ("text", "The capital is paris.", ["Paris"], True),
        ("text", "It lays butterflies' eggs", ["butterfl"], True),
        ("text", "Ag is silver", ["Ag"], True),
        ("text", "Again", ["Ag"], False),
        ("text", "a kilometre", ["K"], False),
    ],
)
def test_answers_are_graded(kind: graders.Kind, answer: str, accepted: list[str], right: bool) -> None:
    assert graders.GRADERS[kind](answer, accepted) is right


def test_our_questions_can_be_checked_and_some_are_held_out() -> None:
    rows = jsonl.read(answered.own_questions(), Question)
    assert len(rows) >= 300
    assert len({row.question for row in rows}) == len(rows)
    assert 100 <= sum(row.split == "test" for row in rows) <= len(rows) // 2
    for row in rows:
        stated = {"choice": "The answer is {}.", "number": "It is {}", "text": "It is {}."}[row.kind]
        assert graders.GRADERS[row.kind](stated.format(row.answers[0]), row.answers), row


def test_the_example_is_routed_by_its_own_scorer_and_calibration() -> None:
    presets = Path(str(files("gearshift.deployments").joinpath("presets")))
    router = Router(config_file.load(presets / "local.yaml"))
    made = artefact.load(presets / "router/local.safetensors")
    assert router.scorer_id == made.digest
    assert made.card.source
    sums = [router.gains(Query(f"What is {n} + {n * 3}?"))[1] for n in range(20, 40)]
    assert min(sums) > router.threshold
    assert router.calibration is not None
    assert router.calibration.quality_bound >= 0.9


CONFIG = """
models: {m: {echo: {}}}
prompts: {none: {}}
policies: {none: {}}
releases: {a-v1: {model: m, prompt: none, policy: none}, b-v1: {model: m, prompt: none, policy: none}}
tiers: {cheap: {release: a-v1, price: {input: 1, output: 1}}, expensive: {release: b-v1, price: {input: 10, output: 10}}}
tenants: {dev: {open: true}}
"""


def record(**changes: Any) -> str:
    fields = {
        "asked": "auto", "tier": "expensive", "score": 0.3, "scorer": "length", "usage": [10, 10, 0], "cost_dollars": 2e-4,
        "unknown": 1,
    }  # fmt: skip
    return json.dumps(fields | changes)


def test_logged_requests_are_replayed_with_another_threshold(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join([record(), record(score=0.9), record(tier="cheap", score=None), record(usage=None)]))
    told = replayed.replay(log, config_file.parse(CONFIG + "router: {scorer: length, threshold: 0.5}"))
    assert (dict(told.before), dict(told.after)) == ({"expensive": 2}, {"cheap": 1, "expensive": 1})
    assert (told.moved, told.skipped) == (1, 2)
    assert told.dollars_before == pytest.approx(4e-4)
    assert told.dollars_after == pytest.approx(2e-4 + 2e-5)
    assert told.gained == pytest.approx(-0.3)


def test_another_scorer_needs_the_queries_in_the_log(tmp_path: Path) -> None:
    log, config = tmp_path / "log.jsonl", config_file.parse(CONFIG + "router: {scorer: random}")
    log.write_text(record())
    with pytest.raises(ConfigError, match=r"log\.jsonl:1: .*record_queries"):
        replayed.replay(log, config)
    log.write_text(record(query="Hi"))
    assert replayed.replay(log, config).skipped == 0
    log.write_text("not json")
    with pytest.raises(ConfigError, match=r"log\.jsonl:1: not a Logged"):
        replayed.replay(log, config)


def gearshift(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gearshift", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_from_answers_to_a_report_on_the_command_line(tmp_path: Path) -> None:
    answers, scorer, promise = tmp_path / "answers.jsonl", tmp_path / "s.safetensors", tmp_path / "c.yaml"
    jsonl.write(answers, world())
    assert "APGR" in gearshift("router", "train", answers, "--out", scorer).stdout
    made = gearshift("router", "calibrate", answers, "--artefact", scorer, "--out", promise, "--quality", "0.9")
    assert made.returncode == 0, made.stderr
    told = gearshift(
        "router", "report", answers, "--artefact", scorer, "--calibration", promise, "--out", tmp_path / "r.md",
        "--plot", tmp_path / "r.png",
    )  # fmt: skip
    assert "| compute saved, cheap attempts counted |" in told.stdout
    assert (tmp_path / "r.png").stat().st_size > 1000
    (tmp_path / "config.yaml").write_text(CONFIG + "router: {artefact: s.safetensors, calibration: c.yaml}\n")
    explained = json.loads(
        gearshift("router", "explain", "What is 4 + 4?", "--config", tmp_path / "config.yaml", "--json").stdout
    )
    assert explained["tier"] == "expensive"
    assert explained["because"]
    assert "set exactly one" in gearshift("router", "calibrate", answers, "--artefact", scorer, "--out", promise).stderr
    wrong = gearshift("router", "train", answers, "--out", scorer, "--split", "tain")
    assert (wrong.returncode, "there are: test, train" in wrong.stderr) == (1, True)
