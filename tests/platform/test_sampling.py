from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gearshift.platform.engine.sampling import (
    distribution,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize,
    sample,
    uniform,
)
from gearshift.platform.request import SamplingParams

SKY = torch.tensor([0.50, 0.25, 0.15, 0.10])  # blue, gray, clear, dark


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    assert keep_top_p(SKY, 0.7).tolist() == pytest.approx([0.667, 0.333, 0, 0], abs=1e-3)
    assert [value > 0 for value in keep_top_p(SKY, 0.9).tolist()] == [True, True, True, False]
    assert keep_top_p(SKY, 0.9).sum().item() == pytest.approx(1)
    assert keep_top_p(SKY, 1.0).tolist() == SKY.tolist()


def test_top_k_keeps_the_k_best() -> None:
    assert keep_top_k(SKY, 2).tolist() == pytest.approx([0.667, 0.333, 0, 0], abs=1e-3)
    assert keep_top_k(SKY, 0).tolist() == SKY.tolist()
    assert keep_top_k(SKY, 9).tolist() == SKY.tolist()


def test_min_p_keeps_what_is_likely_beside_the_best() -> None:
    assert [value > 0 for value in keep_min_p(SKY, 0.3).tolist()] == [True, True, True, False]


def test_order_of_the_vocabulary_does_not_matter() -> None:
    shuffled = SKY[[2, 0, 3, 1]]
    assert keep_top_p(shuffled, 0.7).tolist() == pytest.approx([0, 0.667, 0, 0.333], abs=1e-3)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=40), st.integers(0, 50), st.floats(0, 1), st.floats(0, 1))
def test_filters_leave_a_distribution_with_the_best_token_in_it(
    logits: list[float], k: int, p: float, min_p: float
) -> None:
    scores = torch.tensor(logits)
    found = distribution(scores, SamplingParams(top_k=k, top_p=max(p, 1e-9), min_p=min_p))
    assert found.sum().item() == pytest.approx(1, abs=1e-4)
    assert scores[found > 0].max() >= scores.max() - 1e-5  # of several equals, any


def test_temperature_zero_is_greedy() -> None:
    assert sample(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(temperature=0), [], [], seed=1) == 1


def test_a_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = torch.zeros(1000)
    params = SamplingParams(seed=7)
    first = [sample(logits, params, [], [0] * n, seed=7) for n in range(20)]
    assert first == [sample(logits, params, [], [0] * n, seed=7) for n in range(20)]
    assert first != [sample(logits, params, [], [0] * n, seed=8) for n in range(20)]


def test_draws_follow_the_distribution() -> None:
    counts = Counter(draw(SKY, uniform(3, n)) for n in range(4000))
    assert [counts[token] / 4000 for token in range(4)] == pytest.approx(SKY.tolist(), abs=0.03)


def test_a_draw_never_takes_what_was_filtered_out() -> None:
    kept = keep_top_k(SKY, 1)
    assert {draw(kept, u) for u in (0.0, 0.5, 0.999999, 1 - 2**-53)} == {0}


def test_penalties_by_hand() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0])
    repeated = penalize(logits, SamplingParams(repetition_penalty=2.0), prompt=[0], output=[1])
    assert repeated.tolist() == [1.0, -4.0, 1.0]
    counted = penalize(logits, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt=[0], output=[2, 2])
    assert counted.tolist() == [2.0, -2.0, 0.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]
