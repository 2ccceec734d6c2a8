"""What an answer tells about itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.router.answers import (
    NAMES,
    Attempt,
    Certainty,
    agreement,
    answer_features,
    confidence,
    failure,
    repeats,
    wrong_sums,
)
from gearshift.router.features import Query


def test_confidence_is_the_geometric_mean_of_probabilities() -> None:
    certainty = Certainty([math.log(0.5), math.log(0.125)], [1.0, 3.0])
    assert confidence(Attempt("yes", certainty)) == pytest.approx(0.25)
    assert confidence(Attempt("yes", certainty, agreement=0.5)) == pytest.approx(0.125)
    assert certainty.least == pytest.approx(math.log(0.125))
    assert certainty.entropy == 2.0


@pytest.mark.parametrize(
    ("text", "whole", "told"),
    [
        ("Paris.", True, ""),
        ("  ", True, "empty"),
        ("  ", False, ""),
        ("I'm sorry, but I can't help with that.", True, "refusal"),
        ("I do not know.", True, "refusal"),
        ("and so on and so on and so on and so on", True, "loop"),
        ("very very good", True, ""),
    ],
)
def test_what_is_no_answer_has_no_confidence(text: str, whole: bool, told: str) -> None:
    assert failure(Attempt(text, whole=whole)) == told
    assert (confidence(Attempt(text, whole=whole)) == 0.0) == bool(told)


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5), st.integers(4, 6))
def test_words_that_come_again_and_again_are_a_loop(words: list[str], times: int) -> None:
    assert repeats(" ".join(["begin", *words * times]))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("16 - 3 = 13 eggs, 13 - 4 = 10", (1, 2)),
        ("9 * $2 = $18. 2 + 3 * 4 = 14", (0, 2)),
        ("1,200 / 4 = 300", (0, 1)),
        ("x = 5 and 5 / 0 = 0", (0, 0)),
        ("no sums here", (0, 0)),
        ("50% * 30 = 15", (0, 1)),
    ],
)
def test_sums_in_an_answer_are_checked(text: str, found: tuple[int, int]) -> None:
    assert wrong_sums(text) == found


def test_agreement_of_two_samples() -> None:
    assert agreement("It is 42.", "it is 42") == 1.0
    assert agreement("It is 42.", "It is 17.") < 0.5
    assert agreement("", "") == 1.0


@given(st.text(max_size=200), st.text(max_size=200))
def test_every_answer_has_finite_numbers(query: str, answer: str) -> None:
    numbers = answer_features(Query(query), Attempt(answer))
    assert numbers.shape == (len(NAMES),)
    assert np.isfinite(numbers).all()
