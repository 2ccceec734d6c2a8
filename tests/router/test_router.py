from __future__ import annotations

from collections import Counter
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.platform import config_file
from gearshift.router.arms import Snapshot, serve, tier_of_release
from gearshift.router.features import Query
from gearshift.router.policy import assign
from gearshift.router.score import SCORERS, FeatureScorer, RandomScorer
from gearshift.router.signals import signals


@pytest.mark.parametrize("name", sorted(SCORERS))
@given(text=st.text(max_size=300))
def test_every_scorer_gives_a_number_between_0_and_1_and_the_same_one_again(name: str, text: str) -> None:
    score = SCORERS[name]().score(Query(text))
    assert 0 <= score <= 1
    assert score == SCORERS[name]().score(Query(text))


@pytest.mark.parametrize(
    ("easy", "hard"),
    [
        ("What is the capital of France?", "Write a Python function that merges two sorted lists."),
        ("Hi!", "Why does quicksort degrade to quadratic complexity? Explain step by step."),
        ("Name three colours.", "Solve the equation 3*x^2 + 2*x = 5 and explain each step."),
    ],
)
def test_hard_questions_score_above_easy_ones(easy: str, hard: str) -> None:
    assert FeatureScorer().score(Query(easy)) < 0.5 <= FeatureScorer().score(Query(hard))


def test_the_random_baseline_is_uniform() -> None:
    scores = [RandomScorer().score(Query(f"question {n}")) for n in range(2000)]
    assert sum(score >= 0.7 for score in scores) / 2000 == pytest.approx(0.3, abs=0.04)


def test_signals_by_hand() -> None:
    found = signals("Explain 3 + 4 in python, at most 2 lines", turns=2)
    assert (found.words, found.digits, found.operators, found.code, found.reasoning, found.constraints, found.turns) == (
        9, 3, 1, 1, 1, 1, 2,
    )  # fmt: skip


def test_arms_get_their_share_and_a_unit_keeps_its_arm() -> None:
    weights = {"a": 70.0, "b": 20.0, "c": 10.0, "off": 0.0}
    counts = Counter(assign("salt", f"user-{n}", weights) for n in range(20_000))
    assert [counts[arm] / 20_000 for arm in weights] == pytest.approx([0.7, 0.2, 0.1, 0.0], abs=0.012)
    assert all(assign("salt", f"user-{n}", weights) == assign("salt", f"user-{n}", weights) for n in range(50))


def test_experiments_with_other_salts_are_independent() -> None:
    weights = {"a": 1.0, "b": 1.0}
    same = sum(assign("x", f"{n}", weights) == assign("y", f"{n}", weights) for n in range(10_000))
    assert same / 10_000 == pytest.approx(0.5, abs=0.02)


def test_moving_weight_between_two_arms_moves_only_the_moved_share() -> None:
    before, after = {"a": 90.0, "b": 10.0}, {"a": 80.0, "b": 20.0}
    units = [f"{n}" for n in range(10_000)]
    moved = [unit for unit in units if assign("s", unit, before) != assign("s", unit, after)]
    assert len(moved) / 10_000 == pytest.approx(0.1, abs=0.01)
    assert all(assign("s", unit, before) == "a" for unit in moved)


def config(**tiers: Any) -> Any:
    text = files("gearshift.deployments").joinpath("presets/local.yaml").read_text()
    text = text.replace("cheap: { release: smollm2-v1,", "cheap: { experiment: x,")
    return config_file.parse(text + "\nexperiments: { x: { arms: { smollm2-v1: 1, qwen-v1: 0 } } }\n")


def test_a_tier_is_served_by_its_release_or_by_the_snapshot_s_arm() -> None:
    loaded = config()
    assert serve(loaded, Snapshot.of(loaded), "expensive", "u").release == "qwen-v1"
    served = serve(loaded, Snapshot.of(loaded), "cheap", "u")
    assert (served.release, served.experiment) == ("smollm2-v1", "x")
    moved = Snapshot(1, {"x": {"smollm2-v1": 0.0, "qwen-v1": 1.0}})
    assert serve(loaded, moved, "cheap", "u").release == "qwen-v1"


def test_a_release_has_the_price_of_the_tier_it_serves() -> None:
    loaded = config()
    assert tier_of_release(loaded, "smollm2-v1") == "cheap"
