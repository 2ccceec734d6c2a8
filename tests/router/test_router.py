from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.platform import config_file
from gearshift.router.arms import PARTS, Segment, Snapshot, Trial, Units, serve, tier_of_release
from gearshift.router.features import Query
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


def config(**tiers: Any) -> Any:
    text = files("gearshift.deployments").joinpath("presets/local.yaml").read_text()
    text = text.replace("cheap: { release: smollm2-v1,", "cheap: { experiment: x,")
    return config_file.parse(text + "\nexperiments: { x: { arms: { smollm2-v1: 1, qwen-v1: 0 } } }\n")


def test_a_tier_is_served_by_its_release_or_by_the_snapshot_s_arm() -> None:
    loaded = config()
    assert serve(loaded, Snapshot.of(loaded), "expensive", Units("u")).release == "qwen-v1"
    served = serve(loaded, Snapshot.of(loaded), "cheap", Units("u"))
    assert (served.release, served.exposure and served.exposure.experiment) == ("smollm2-v1", "x")
    moved = Snapshot(1, {"x": Trial((Segment(PARTS, "qwen-v1"),), period=1)})
    assert serve(loaded, moved, "cheap", Units("u")).release == "qwen-v1"


def test_a_release_has_the_price_of_the_tier_it_serves() -> None:
    loaded = config()
    assert tier_of_release(loaded, "smollm2-v1") == "cheap"
