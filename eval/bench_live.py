"""`gearshift bench router --live`: route, then verify, on the tiers of a real deployment and questions that can be checked."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gearshift.eval.answered import Answered, qualities, seconds
from gearshift.eval.bench import Bar, Report, collect
from gearshift.eval.routing import best_at, calibrated, curves, rows_of, split, train_scorer
from gearshift.router import calibrate
from gearshift.router.artefact import Artefact
from gearshift.router.calibrate import Outcome, Rows
from gearshift.router.calibration import Target
from gearshift.router.metrics import Numbers

FLOOR = 0.95
SAVING = 0.6
FOLDS = 5


def run_live(answered: Sequence[Answered], report: Report) -> Rows:
    """Every question is routed by a scorer, a judge and thresholds that have not seen it (5 folds over all of them); the
    held-out split once more by what the other split gives. Returns the rows of the folds, for curves."""
    folds = np.random.default_rng(0).permutation(len(answered)) % FOLDS
    cuts = [
        tuple(
            [row for row, place in zip(answered, folds, strict=True) if (place == fold) == mine]
            for mine in (False, True)
        )
        for fold in range(FOLDS)
    ]
    estimated = [_routed(seen, left, bound=False) for seen, left in cuts]
    promised = [_routed(seen, left, bound=True) for seen, left in cuts]
    rows = Rows(*(np.concatenate([getattr(part, n) for part, _ in estimated]) for n in Rows.__dataclass_fields__))
    name = f"live, {len(answered)} questions in folds"
    saving, quality = _told(f"{name}, 95 % by estimate", rows, [done for _, done in estimated], report)
    _told(f"{name}, 95 % with a bound", rows, [done for _, done in promised], report)
    for bound in (False, True):
        held_out, outcome = _routed(split(answered, "train"), split(answered, "test"), bound)
        way = "with a bound" if bound else "by estimate"
        _told(f"live, {len(held_out.scores)} held out, 95 % {way}", held_out, [outcome], report)
    found = {curve.name: best_at(curve, FLOOR) for curve in curves(rows)}
    for way, saved in found.items():
        report.results.append(collect(f"live: {way}, saved at 95 % at the best threshold", "%", [100 * saved]))
    for tier, right, spent in zip(answered[0].tiers, qualities(answered).T, seconds(answered).T, strict=True):
        report.results.append(collect(f"live: {tier}, right", "%", [100 * float(right.mean())]))
        report.results.append(collect(f"live: {tier}, an answer", "CPU s", [float(spent.mean())]))
    best = max(found["router"], found["cascade"])
    report.results.append(
        collect("live: of what an oracle saves, the best threshold saves", "%", [100 * best / found["oracle"]])
    )
    report.bars.append(Bar("live: quality over always expensive, by estimate, %", 100 * quality, 100 * FLOOR, "min"))
    report.bars.append(Bar("live: compute saved by it, %", 100 * saving, 100 * SAVING, "min"))
    return rows


def _routed(seen: Sequence[Answered], left: Sequence[Answered], bound: bool) -> tuple[Rows, Outcome]:
    with tempfile.TemporaryDirectory(prefix="gearshift-") as folder:
        scorer, judge = (_trained(seen, kind, Path(folder)) for kind in ("tfidf", "answer"))
        promise = calibrated(seen, scorer, judge, Target(quality=FLOOR, bound=bound), "", None)
    rows = rows_of(left, scorer, judge, None)
    assert promise.cascade is not None
    return rows, calibrate.outcome(rows, promise.threshold, promise.cascade.threshold)


def _trained(rows: Sequence[Answered], kind: str, folder: Path) -> Artefact:
    return train_scorer(rows, kind, folder / f"{kind}.safetensors", "")  # type: ignore[arg-type]


def _told(name: str, rows: Rows, done: Sequence[Outcome], report: Report) -> tuple[float, float]:
    costs, right = (np.concatenate([getattr(each, what) for each in done]) for what in ("costs", "qualities"))
    escalated = np.concatenate([each.escalated for each in done])
    rounds = np.random.default_rng(0).integers(0, len(costs), (1000, len(costs)))
    saving = _interval(rows.expensive_costs - costs, rows.expensive_costs, rounds)
    quality = _interval(right, rows.strong, rounds)
    report.results.append(collect(f"{name}: compute saved, with 95 % interval", "%", [100 * value for value in saving]))
    report.results.append(
        collect(f"{name}: quality over always expensive, with 95 % interval", "%", [100 * v for v in quality])
    )
    report.results.append(collect(f"{name}: given up and asked again", "%", [100 * float(escalated.mean())]))
    return saving[1], quality[1]


def _interval(part: Numbers, whole: Numbers, rounds: NDArray[np.int64]) -> tuple[float, float, float]:
    """Low, value, high."""
    low, high = np.quantile(part[rounds].sum(axis=1) / whole[rounds].sum(axis=1), [0.025, 0.975])
    return float(low), float(part.sum() / whole.sum()), float(high)
