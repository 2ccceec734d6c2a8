"""How much a step may take on so that running streams keep their rhythm: a model of what steps cost, and a limit."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

STRETCH = 2.0
"""Without a target, other work may make a step this many times as long as its streams alone would."""
MARGIN = 0.85
"""With a target, steps are planned for this part of it, until enough of them have shown how far off the plan is."""
ENOUGH = 32
KEPT = 98
"""Percentile of the steps that are planned to keep the target: a little more than the 95 that is promised."""
FIRST_CHUNK = 16
GROWTH = 2


class Load(NamedTuple):
    """What a step computes: rows, and scores of attention (each row against every token before it)."""

    rows: int = 0
    scores: int = 0

    def plus(self, rows: int, start: int) -> Load:
        """With `rows` more, of a sequence that has `start` tokens computed."""
        return Load(self.rows + rows, self.scores + rows * start + rows * (rows + 1) // 2)


class CostModel:
    """seconds = fixed + a * rows + b * scores, least squares over the last steps; never negative.

    Steps of streams alone and steps with other work are kept apart, so that a long time of one kind does not make it
    forget the other.
    """

    def __init__(self, memory: int = 48) -> None:
        self._plain: deque[tuple[Load, float]] = deque(maxlen=memory)
        self._mixed: deque[tuple[Load, float]] = deque(maxlen=memory)
        self._weights = np.zeros(3)
        self._stale = False

    def observe(self, load: Load, seconds: float, mixed: bool) -> None:
        (self._mixed if mixed else self._plain).append((load, seconds))
        self._stale = True

    @property
    def known(self) -> bool:
        """Whether there is anything to go by."""
        return len(self._mixed) >= 2

    def seconds(self, load: Load) -> float:
        if self._stale:
            self._fit()
        fixed, row, score = self._weights
        return float(fixed + row * load.rows + score * load.scores)

    def _fit(self) -> None:
        samples = [*self._plain, *self._mixed]
        features = np.array([(1.0, load.rows, load.scores) for load, _ in samples])
        seconds = np.array([taken for _, taken in samples])
        features_per_second = features / np.maximum(seconds, 1e-9)[:, None]  # relative errors: long steps weigh no more
        scale = features_per_second.max(axis=0)
        used = scale > 0
        self._weights = np.zeros(3)
        while used.any():
            part = features_per_second[:, used] / scale[used]
            solution = np.linalg.lstsq(part, np.ones(len(samples)), rcond=1e-6)[0] / scale[used]
            if (solution >= 0).all():
                self._weights[used] = solution
                break
            used[np.flatnonzero(used)[solution < 0]] = False
        self._stale = False


class Pacer:
    """Owns the cost model and the limit. `target_itl_s` None: relative to the streams themselves."""

    def __init__(self, target_itl_s: float | None = None) -> None:
        self._target = target_itl_s
        self._cost = CostModel()
        self._surprises: deque[float] = deque(maxlen=2 * ENOUGH)  # how much longer mixed steps took than was planned
        self._largest = FIRST_CHUNK

    def observe(self, load: Load, streams: int, seconds: float) -> None:
        """A step of `load`, of which `streams` rows were running streams, took `seconds`."""
        others = load.rows - streams
        if others and self._cost.known:
            self._surprises.append(seconds / max(self._cost.seconds(load), 1e-9))
        self._cost.observe(load, seconds, mixed=others > 0)
        if streams and others:
            self._largest = max(FIRST_CHUNK, others * GROWTH)

    def limit(self, streams: Load) -> float:
        """Seconds that a step may take which carries these streams."""
        if self._target is not None:
            return self._target * self._margin()
        return STRETCH * self._cost.seconds(streams) if self._cost.known else 0.0

    def _margin(self) -> float:
        if len(self._surprises) < ENOUGH:
            return MARGIN
        return 1 / max(1.0, float(np.percentile(self._surprises, KEPT)))

    def room(self, load: Load, start: int, wanted: int, limit: float, others: int) -> int:
        """How many of `wanted` rows of a sequence with `start` tokens computed still fit a step that has `load`, of which
        `others` rows are not streams. Chunks grow step by step, since a cost far from all seen is a guess."""
        wanted = min(wanted, self._largest - others)
        if wanted <= 0 or not self._cost.known:
            return max(0, wanted)
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._cost.seconds(load.plus(middle, start)) <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
