"""Whether a calibration still fits the traffic: the scores of each tenant against those it was made on, and how often the
cheap tier's answers are given up. Counts only; owned by one gateway."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

WINDOW = 1000
"""Queries that are looked back on."""
ENOUGH = 200
"""Fewer tell nothing."""
BINS = 10
REFERENCE = 2000
"""Scores that stand for a distribution given by its quantiles."""
ALERT = 0.25
"""Of the population stability index: the usual mark for a shift that needs action (Siddiqi 2006, "Credit Risk Scorecards",
chapter 9). By chance alone it is about (BINS - 1) / count, so 200 queries give 0.05."""
SURE = 4.0
"""Standard errors between the share of answers given up and the calibration's."""


def stability_index(quantiles: Sequence[float], scores: Sequence[float]) -> float:
    """Population stability index of scores against a distribution given by its quantiles, least to greatest: 0 when the same.

    Sum over bins of (a - e) ln(a / e) with the shares a that are seen and e that are expected; empty bins count half a row.
    """
    marks = np.linspace(0, 1, len(quantiles))
    edges = np.unique(np.interp(np.linspace(0, 1, BINS + 1)[1:-1], marks, quantiles))  # equal scores share a bin

    def shares(values: Sequence[float]) -> NDArray[np.float64]:
        counts = np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1)
        return np.maximum(counts, 0.5) / len(values)

    seen, expected = shares(scores), shares(np.interp(np.linspace(0, 1, REFERENCE), marks, quantiles).tolist())
    return float(((seen - expected) * np.log(seen / expected)).sum())


@dataclass(slots=True)
class _Tenant:
    scores: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    given_up: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    index: float = 0.0
    since: int = 0


class Drift:
    """`escalated`: share of judged answers that the calibration expects to be given up, or None without a cascade."""

    def __init__(self, quantiles: Sequence[float], escalated: float | None) -> None:
        self._quantiles = quantiles
        self._escalated = escalated
        self._tenants: dict[str, _Tenant] = {}

    def scored(self, tenant: str, score: float) -> float | None:
        """Takes a score in. Returns the tenant's new index when it was computed anew, which it is once in a while."""
        seen = self._tenants.setdefault(tenant, _Tenant())
        seen.scores.append(score)
        seen.since += 1
        if len(seen.scores) < ENOUGH or seen.since < ENOUGH // 4:
            return None
        seen.since = 0
        seen.index = stability_index(self._quantiles, seen.scores)
        return seen.index

    def judged(self, tenant: str, given_up: bool) -> None:
        self._tenants.setdefault(tenant, _Tenant()).given_up.append(given_up)

    def alerts(self) -> list[str]:
        """What no longer fits, in words."""
        found = []
        for name, seen in self._tenants.items():
            if seen.index >= ALERT:
                found.append(f"tenant {name}: its scores differ from the calibration's (index {seen.index:.2f})")
            if self._escalated is not None and (shift := self._shift(seen)) is not None:
                found.append(
                    f"tenant {name}: {shift:.0%} of its answers are given up, calibrated were {self._escalated:.0%}"
                )
        return found

    def _shift(self, seen: _Tenant) -> float | None:
        count = len(seen.given_up)
        if count < ENOUGH or self._escalated is None:
            return None
        share, expected = sum(seen.given_up) / count, min(max(self._escalated, 0.01), 0.99)
        return share if abs(share - expected) > SURE * math.sqrt(expected * (1 - expected) / count) else None
