"""Thresholds and their promises, on worlds whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from gearshift.router.calibrate import (
    Rows,
    for_cost,
    for_quality,
    for_quality_with_cascade,
    for_share,
    measured,
    outcome,
)
from gearshift.router.metrics import Numbers, apgr, cpt, interval, oracle, recovered, saved_at


def world(seed: int, rows: int) -> tuple[Numbers, Numbers, Numbers]:
    """scores, weak, strong: a strong model that is better by a random amount, and a score that sees some of it."""
    rng = np.random.default_rng(seed)
    hardness = rng.normal(size=rows)
    slope, noise = rng.uniform(0.5, 2.5), rng.uniform(0.3, 2.0)
    easy = 1 / (1 + np.exp(slope * hardness - rng.uniform(-0.5, 1.0)))
    known = np.maximum(easy, 1 / (1 + np.exp(slope * hardness - rng.uniform(1.5, 3.0))))
    weak, strong = (rng.random(rows) < share for share in (easy, known))
    return hardness + rng.normal(0, noise, rows), weak.astype(float), strong.astype(float)


def plain(scores: Numbers, weak: Numbers, strong: Numbers) -> Rows:
    ones = np.ones(len(scores))
    return Rows(scores, np.empty(0), weak, strong, 0.2 * ones, ones)


def judged(seed: int, rows: int) -> Rows:
    """With a judge whose confidence says something of the cheap answer."""
    scores, weak, strong = world(seed, rows)
    confidences = weak + np.random.default_rng(seed + 1000).normal(0, 0.8, rows)
    ones = np.ones(rows)
    return Rows(scores, confidences, weak, strong, 0.2 * ones, ones)


def part(rows: Rows, of: slice) -> Rows:
    return Rows(*(getattr(rows, name)[of] for name in Rows.__dataclass_fields__))


def quality(threshold: float, scores: Numbers, weak: Numbers, strong: Numbers) -> float:
    return float(np.where(scores >= threshold, strong, weak).mean() / strong.mean())


@pytest.mark.parametrize(("floor", "rows"), [(0.95, 500), (0.9, 300)])
def test_a_quality_floor_holds_in_95_of_100_worlds_and_still_saves(floor: float, rows: int) -> None:
    held, cheap = 0, []
    for seed in range(200):
        scores, weak, strong = world(seed, rows + 20_000)
        threshold = for_quality(scores[:rows], weak[:rows], strong[:rows], floor)
        new = scores[rows:], weak[rows:], strong[rows:]
        held += quality(threshold, *new) >= floor
        cheap.append(float((new[0] < threshold).mean()))
    assert held >= 190
    assert np.mean(cheap) > 0.1


def test_the_promised_bound_and_interval_hold_too() -> None:
    inside = above = 0
    for seed in range(200):
        scores, weak, strong = world(seed, 20_500)
        threshold = for_share(scores[500:1000], 0.4)
        told = measured(plain(scores[:500], weak[:500], strong[:500]), threshold, None, seed)
        truth = quality(threshold, scores[1000:], weak[1000:], strong[1000:])
        inside += told.quality.low <= truth <= told.quality.high
        above += truth >= told.quality_bound
    assert inside >= 180
    assert above >= 180


def test_a_share_is_held_on_new_traffic_without_labels() -> None:
    for seed in range(50):
        scores, _, _ = world(seed, 20_500)
        threshold = for_share(scores[:500], 0.3)
        assert abs(float((scores[500:] >= threshold).mean()) - 0.3) < 0.08
    scores = np.arange(10.0)
    assert [float((scores >= for_share(scores, share)).mean()) for share in (0.0, 0.3, 1.0)] == [0.0, 0.3, 1.0]
    with pytest.raises(ValueError, match="between 0 and 1"):
        for_share(scores, 1.5)


def test_a_cost_is_kept() -> None:
    scores = np.linspace(0, 1, 100)
    cheap, expensive = np.full(100, 1.0), np.full(100, 5.0)
    threshold = for_cost(scores, cheap, expensive, 2.0)
    assert np.where(scores >= threshold, expensive, cheap).mean() == pytest.approx(2.0)
    assert (scores >= for_cost(scores, cheap, expensive, 9.0)).all()
    with pytest.raises(ValueError, match="cheap tier alone"):
        for_cost(scores, cheap, expensive, 0.5)


def test_nothing_is_promised_that_few_rows_can_not_show() -> None:
    scores, ones = np.linspace(0, 1, 12), np.ones(12)
    threshold = for_quality(scores, np.where(scores > 0.8, 0.0, 1.0), ones, 0.99)
    assert (scores >= threshold).mean() > 0.5


def test_curves_by_hand() -> None:
    weak, strong = np.array([1.0, 0.0, 0.0, 1.0]), np.array([1.0, 1.0, 1.0, 1.0])
    curve = recovered(np.array([0.1, 0.9, 0.8, 0.2]), weak, strong)
    assert curve.tolist() == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert apgr(curve) == pytest.approx(0.75)
    assert (cpt(curve, 0.5), cpt(curve, 0.8)) == (25.0, 50.0)
    assert saved_at(0.95, np.array([0.1, 0.9, 0.8, 0.2]), weak, strong) == 0.5
    assert apgr(recovered(np.zeros(4), weak, strong)) == pytest.approx(0.5)  # equal scores are a coin
    assert recovered(oracle(weak, strong), weak, strong)[2] == 1.0
    with pytest.raises(ValueError, match="not better"):
        recovered(weak, strong, weak)


def test_an_interval_covers_the_mean() -> None:
    values = np.random.default_rng(0).normal(3, 1, 400)
    low, high = interval(lambda rows: float(values[rows].mean()), 400)
    assert low < 3 < high < low + 0.3


def test_a_cascade_keeps_its_floor_too_and_saves_more() -> None:
    held, saved, without = 0, [], []
    for seed in range(200):
        rows = judged(seed, 10_400)
        seen, new = part(rows, slice(400)), part(rows, slice(400, None))
        done = outcome(new, *for_quality_with_cascade(seen, 0.95))
        held += done.qualities.sum() >= 0.95 * new.strong.sum()
        saved.append(1 - done.costs.mean())
        without.append(float((new.scores < for_quality(seen.scores, seen.weak, seen.strong, 0.95)).mean()) * 0.8)
    assert held >= 190
    assert np.mean(saved) > np.mean(without) + 0.03


def test_an_attempt_that_was_given_up_costs_both() -> None:
    rows = Rows(
        scores=np.array([0.9, 0.1, 0.1]), confidences=np.array([0.0, 0.2, 0.8]),
        weak=np.array([0.0, 0.0, 1.0]), strong=np.ones(3), cheap_costs=np.full(3, 1.0), expensive_costs=np.full(3, 5.0),
    )  # fmt: skip
    done = outcome(rows, 0.5, 0.5)
    assert done.expensive.tolist() == [True, False, False]
    assert done.escalated.tolist() == [False, True, False]
    assert done.costs.tolist() == [5.0, 6.0, 1.0]
    assert done.qualities.tolist() == [1.0, 1.0, 1.0]
    assert measured(rows, 0.5, 0.5).saving.value == pytest.approx(1 - 12 / 15)
    assert outcome(rows, 0.5, None).costs.tolist() == [5.0, 1.0, 1.0]
