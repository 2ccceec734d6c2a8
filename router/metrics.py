"""How good a score is: curves of quality over the share of expensive calls. Pure functions of arrays.

RouteLLM (Ong et al. 2024, arXiv 2406.18665, section 3) defines the performance gap recovered, APGR and CPT.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def recovered(scores: Numbers, weak: Numbers, strong: Numbers) -> Numbers:
    """Performance gap recovered when the k queries of the highest scores go to the strong model, for k = 0 to n: [n + 1].

    scores, weak, strong: [n]. Queries of the same score are sent in an even share, as a coin would. Raises `ValueError` when
    the strong model is not better in sum: then there is no gap to recover.
    """
    gap = strong - weak
    if gap.sum() <= 0:
        raise ValueError("the strong model is not better than the weak one on these rows")
    order = np.argsort(-scores, kind="stable")
    values, place = np.unique(-scores[order], return_inverse=True)
    mean = np.bincount(place, weights=gap[order], minlength=len(values)) / np.bincount(place, minlength=len(values))
    gains: Numbers = np.concatenate([[0.0], np.cumsum(mean[place])]) / gap.sum()
    return gains


def apgr(curve: Numbers) -> float:
    """Average of the recovered gap over the share of strong calls; 0.5 for a coin."""
    return float(np.trapezoid(curve, dx=1 / (len(curve) - 1)))


def cpt(curve: Numbers, wanted: float) -> float:
    """Call-performance threshold: the smallest share of strong calls, in %, that recovers `wanted` of the gap."""
    return 100 * float(np.argmax(curve >= wanted)) / (len(curve) - 1)


def saved_at(floor: float, scores: Numbers, weak: Numbers, strong: Numbers) -> float:
    """Share of strong calls saved while the quality is at least `floor` of the strong model's."""
    order = np.argsort(-scores, kind="stable")
    quality = weak.sum() + np.concatenate([[0.0], np.cumsum((strong - weak)[order])])
    reached = quality >= floor * strong.sum()
    return 1 - float(np.argmax(reached)) / len(scores) if reached.any() else 0.0


def oracle(weak: Numbers, strong: Numbers) -> Numbers:
    """Scores of one who knows both answers: first the queries that gain, last those that lose."""
    return strong - weak


def interval(
    statistic: Callable[[NDArray[np.intp]], float], count: int, seed: int = 0, rounds: int = 500, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap (Efron 1979) over rows; `statistic` takes the chosen rows. Rounds without a value are left out."""
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(rounds):
        try:
            values.append(statistic(rng.integers(0, count, count)))
        except ValueError:
            continue
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
