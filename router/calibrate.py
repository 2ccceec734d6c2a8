"""From labelled queries to a threshold with a promise. Pure functions of arrays.

A query goes to the expensive tier when its score reaches the threshold. scores, weak, strong: [n], qualities in 0 to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gearshift.router.metrics import Numbers

LEVEL = 0.95
STEPS = 200
"""Thresholds that are tried, from everything expensive to everything cheap."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its confidence interval at `LEVEL`."""

    value: float
    low: float
    high: float


def for_share(scores: Numbers, share: float) -> float:
    """The threshold that sends `share` of such queries to the expensive tier. Needs no labels: take it anew on new traffic."""
    if not 0 <= share <= 1:
        raise ValueError(f"share: {share} is not between 0 and 1")
    ordered = np.sort(scores)[::-1]
    count = round(share * len(ordered))
    if count == 0:
        return float(np.nextafter(ordered[0], np.inf))
    return float(ordered[count - 1])


def for_cost(scores: Numbers, cheap_cost: Numbers, expensive_cost: Numbers, per_query: float) -> float:
    """The lowest threshold whose mean cost is at most `per_query`; costs [n] in the same unit. Raises `ValueError` when even
    the cheap tier alone costs more."""
    order = np.argsort(-scores, kind="stable")
    total = cheap_cost.sum() + np.concatenate([[0.0], np.cumsum((expensive_cost - cheap_cost)[order])])
    fits = np.flatnonzero(total / len(scores) <= per_query)
    if not fits.size:
        raise ValueError(f"cost: the cheap tier alone costs {cheap_cost.mean():.3g} a query, more than {per_query:.3g}")
    return for_share(scores, fits[-1] / len(scores))


def for_quality(scores: Numbers, weak: Numbers, strong: Numbers, floor: float, level: float | None = LEVEL) -> float:
    """The highest threshold that keeps, with probability `level`, the quality at `floor` of the expensive tier's or above.

    Fixed-sequence testing (Angelopoulos et al. 2021, "Learn then Test", arXiv 2110.01052, section 3.2): thresholds are tried
    from everything expensive downwards in quality, each with the same level, until the first that does not pass, so that
    trying many costs nothing. Returns the threshold of everything expensive when none passes. `level` None: by estimate, which
    is missed as often as not.
    """
    candidates = np.quantile(scores, np.linspace(0, 1, STEPS + 1))
    passed = float(candidates[0])
    for threshold in [*candidates, np.nextafter(candidates[-1], np.inf)]:
        margin = np.where(scores >= threshold, strong, weak) - floor * strong
        if lower_bound(margin, -floor, level) >= 0:
            passed = float(threshold)
        elif level is not None:
            break
    return passed


def lower_bound(values: Numbers, worst: float, level: float | None = LEVEL) -> float:
    """One-sided bound of the mean, by Student's t; the mean itself without a level. One value as bad as can be is added: where
    few rows show no error, their variance says nothing about the errors that are still to come."""
    if level is None:
        return float(values.mean())
    from scipy import stats

    padded = np.append(values, worst)
    spread = padded.std(ddof=1) / math.sqrt(len(padded))
    return float(padded.mean() - stats.t.ppf(level, len(padded) - 1) * spread)


@dataclass(frozen=True, slots=True)
class Rows:
    """Labelled queries with what the router sees and what each way costs. All [n]; costs in one unit, of your choice."""

    scores: Numbers
    confidences: Numbers
    """Of the judge, in the cheap tier's answers; empty without a cascade."""
    weak: Numbers
    strong: Numbers
    cheap_costs: Numbers
    expensive_costs: Numbers


@dataclass(frozen=True, slots=True)
class Outcome:
    """What two thresholds do, row by row. `escalated`: asked both tiers."""

    expensive: NDArray[np.bool_]
    escalated: NDArray[np.bool_]
    qualities: Numbers
    costs: Numbers


def outcome(rows: Rows, threshold: float, confidence: float | None) -> Outcome:
    """Route, then verify: scores at the threshold or above go to the expensive tier at once; of the others, answers of less
    than `confidence` are given up, and their cost is counted. None: no cascade."""
    direct = rows.scores >= threshold
    none: NDArray[np.bool_] = np.zeros_like(direct)
    escalated = none if confidence is None else ~direct & (rows.confidences < confidence)
    expensive = direct | escalated
    costs = np.where(expensive, rows.expensive_costs, 0.0) + np.where(direct, 0.0, rows.cheap_costs)
    return Outcome(direct, escalated, np.where(expensive, rows.strong, rows.weak), costs)


DIRECT = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0)
"""Shares of the queries that go to the expensive tier without asking the cheap one, as far as they are tried."""


def for_quality_with_cascade(rows: Rows, floor: float, level: float | None = LEVEL) -> tuple[float, float]:
    """Threshold and confidence that cost least among those that keep the quality at `floor` of the expensive tier's with
    probability `level`.

    For each direct share the confidences are tried from giving up everything downwards, as in `for_quality`; the shares
    divide the error between them (Bonferroni).
    """
    each = None if level is None else 1 - (1 - level) / len(DIRECT)
    best: tuple[float, float, float] | None = None
    for share in DIRECT:
        threshold = for_share(rows.scores, share)
        confidence = _lowest_confidence(rows, threshold, floor, each)
        cost = float(outcome(rows, threshold, confidence).costs.sum())
        if best is None or cost < best[0]:
            best = cost, threshold, confidence
    assert best is not None
    return best[1], best[2]


def _lowest_confidence(rows: Rows, threshold: float, floor: float, level: float | None) -> float:
    candidates = np.unique(np.quantile(rows.confidences, np.linspace(0, 1, STEPS + 1)))[::-1]
    passed = float(np.nextafter(candidates[0], np.inf))  # gives everything up
    for confidence in [*candidates, -np.inf]:
        margin = outcome(rows, threshold, float(confidence)).qualities - floor * rows.strong
        if lower_bound(margin, -floor, level) >= 0:
            passed = float(confidence)
        elif level is not None:
            break
    return passed


@dataclass(frozen=True, slots=True)
class Measured:
    """quality: of the routed answers over always-expensive. saving: of the expensive tier's compute, cheap attempts counted."""

    expensive_share: float
    escalated_share: float
    quality: Estimate
    quality_bound: float
    saving: Estimate


def measured(rows: Rows, threshold: float, confidence: float | None, seed: int = 0) -> Measured:
    """With bootstrap intervals. Use rows that the thresholds were not chosen on, or read it as optimistic."""
    done = outcome(rows, threshold, confidence)
    rounds = np.random.default_rng(seed).integers(0, len(rows.scores), (1000, len(rows.scores)))
    return Measured(
        expensive_share=float(done.expensive.mean()),
        escalated_share=float(done.escalated.mean()),
        quality=_ratio(done.qualities, rows.strong, rounds),
        quality_bound=float(np.quantile(_ratios(done.qualities, rows.strong, rounds), 1 - LEVEL)),
        saving=_ratio(rows.expensive_costs - done.costs, rows.expensive_costs, rounds),
    )


def _ratios(part: Numbers, whole: Numbers, rounds: NDArray[np.int64]) -> Numbers:
    ratios: Numbers = part[rounds].sum(axis=1) / np.maximum(whole[rounds].sum(axis=1), 1e-12)
    return ratios


def _ratio(part: Numbers, whole: Numbers, rounds: NDArray[np.int64]) -> Estimate:
    low, high = np.quantile(_ratios(part, whole, rounds), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(part.sum() / max(float(whole.sum()), 1e-12)), float(low), float(high))
