"""`gearshift bench eval`: how often the statistics err when somebody always looks, and how soon they find what is there.

Everything is simulated with fixed seeds. Where a look after every observation would take hours with the functions that
decide, the same formulas run on arrays; a test holds the two equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, chisquare, norm

from gearshift.eval import sequential as seq
from gearshift.eval.bench import Bar, Report, collect
from gearshift.platform.config import Experiment
from gearshift.platform.weights.source import Progress
from gearshift.router.arms import PARTS, allocate, assign

Numbers = NDArray[np.float64]
ALPHA = 0.05
WORLDS = 2000
LENGTH = 20_000
QUANTILE_WORLDS, QUANTILE_EVERY = 200, 100
MIN_SAMPLES = 30
UNITS = 1_000_000
SPREADS = (0.5, 0.8)
"""Standard deviations of the logarithm of a latency: what one prompt length, and a mix of them, look like."""


def run_eval_bench(report: Report, progress: Progress, worlds: int = WORLDS, units: int = UNITS) -> None:
    """Fills the report."""
    parts: list[Callable[[Report, int, int], None]] = [
        _rates_a_a,
        _means_a_a,
        _quantiles_a_a,
        _falls,
        _slower,
        _assignment,
    ]
    for number, part in enumerate(parts):
        progress("worlds", number, len(parts))
        part(report, worlds, units)
    progress("worlds", len(parts), len(parts))


def rate_path(is_b: NDArray[np.bool_], outcome: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Counts and totals of both arms after each observation: count a, total a, count b, total b, each [n]."""
    count_b, total_b = np.cumsum(is_b).astype(float), np.cumsum(outcome * is_b)
    count_a, total_a = np.arange(1, len(outcome) + 1) - count_b, np.cumsum(outcome) - total_b
    return count_a, total_a, count_b, total_b


def rate_evidence(path: tuple[Numbers, Numbers, Numbers, Numbers]) -> Numbers:
    """`sequential.rate_differs` after each observation: [n]."""
    count_a, total_a, count_b, total_b = path
    pooled = (total_a + total_b) / (count_a + count_b)
    mixed = seq.log_mixture(total_a, count_a) + seq.log_mixture(total_b, count_b)
    found: Numbers = mixed - seq.log_likelihood(total_a + total_b, count_a + count_b, pooled)
    return found


def _rates_a_a(report: Report, worlds: int, _: int) -> None:
    """Nothing differs, and somebody looks after each observation."""
    rng = np.random.default_rng(1)
    called = fixed = fell = 0
    needed, z_needed = seq.surprise(ALPHA), float(norm.ppf(1 - ALPHA / 2))
    for _world in range(worlds):
        path = rate_path(rng.random(LENGTH) < 0.5, (rng.random(LENGTH) < 0.9).astype(float))
        enough = np.minimum(path[0], path[2]) >= MIN_SAMPLES
        called += bool((rate_evidence(path)[enough] >= needed).any())
        fixed += bool((np.abs(_z(path))[enough] >= z_needed).any())
        fell += math.isfinite(_first_below(path, needed, MIN_SAMPLES))
    _false_calls(report, "A/A, rates: calls a difference", called, worlds)
    _false_calls(report, "A/A, rates, one guard: rolls back", fell, worlds)
    report.bars.append(Bar("A/A, rates, one guard: rolls back, %", 100 * fell / worlds, 100 * ALPHA, "max"))
    report.results.append(
        collect("A/A, rates: z-test looked at as often: calls a difference", "%", [100 * fixed / worlds])
    )
    report.bars.append(Bar("A/A, rates: calls a difference, %", 100 * called / worlds, 100 * ALPHA, "max"))


def _z(path: tuple[Numbers, Numbers, Numbers, Numbers]) -> Numbers:
    count_a, total_a, count_b, total_b = path
    pooled = (total_a + total_b) / (count_a + count_b)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(pooled * (1 - pooled) * (1 / count_a + 1 / count_b))
        found = (total_b / count_b - total_a / count_a) / error
    return np.nan_to_num(found)


def _means_a_a(report: Report, worlds: int, _units: int) -> None:
    """Costs of a long tail (log-normal, deviation 1): the asymptotic sequence at its hardest."""
    rng = np.random.default_rng(2)
    called = 0
    for _world in range(worlds):
        is_b, value = rng.random(LENGTH) < 0.5, rng.lognormal(0, 1, LENGTH)
        count_a, total_a, count_b, total_b = rate_path(is_b, value)
        _count_a, squares_a, _count_b, squares_b = rate_path(is_b, value**2)
        enough = np.minimum(count_a, count_b) >= MIN_SAMPLES
        a, b = (x[enough] for x in (count_a, count_b))
        mean_a, mean_b = total_a[enough] / a, total_b[enough] / b
        error = (squares_a[enough] / a - mean_a**2) / (a - 1) + (squares_b[enough] / b - mean_b**2) / (b - 1)
        called += bool(np.any(np.abs(mean_b - mean_a) > seq.half_width(a + b, error, ALPHA)))
    _false_calls(report, "A/A, means of a long tail: calls a difference", called, worlds)
    report.bars.append(
        Bar("A/A, means of a long tail: calls a difference, %", 100 * called / worlds, 100 * ALPHA, "max")
    )


def _quantiles_a_a(report: Report, worlds: int, _: int) -> None:
    """Looked at every 100 observations, in both directions, as the function that decides takes its time."""
    rng, called = np.random.default_rng(3), 0
    worlds = min(worlds, QUANTILE_WORLDS)
    needed = seq.surprise(ALPHA / 2)
    for _world in range(worlds):
        arms: tuple[Counter[int], Counter[int]] = Counter(), Counter()
        found = False
        for start in range(0, LENGTH, QUANTILE_EVERY):
            for value in rng.lognormal(0, SPREADS[0], QUANTILE_EVERY):
                arms[int(rng.random() < 0.5)][seq.bucket(value)] += 1
            found = any(seq.quantile_above(*pair, 0.95) > needed for pair in (arms, arms[::-1])) and start > MIN_SAMPLES
            if found:
                break
        called += found
    _false_calls(report, "A/A, p95, looked at every 100: calls a difference", called, worlds)
    report.bars.append(Bar("A/A, p95: calls a difference, %", 100 * called / worlds, 100 * ALPHA, "max"))


def _false_calls(report: Report, name: str, called: int, worlds: int) -> None:
    low = float(beta.ppf(0.025, called, worlds - called + 1)) if called else 0.0
    high = float(beta.ppf(0.975, called + 1, worlds - called))
    values = [100 * low, 100 * called / worlds, 100 * high]
    report.results.append(collect(f"{name} (95 % interval)", "%", values))


def _falls(report: Report, worlds: int, _: int) -> None:
    """A success rate falls, at 50/50, with the guards, alpha and least samples that a config has by default."""
    experiment = Experiment(arms={"good": 1.0, "bad": 1.0})
    needed = seq.surprise(experiment.alpha / len(experiment.guards))
    for rate, within in ((0.8, 2500), (0.5, 150)):
        rng, delays = np.random.default_rng(4), []
        for _world in range(worlds):
            is_b = rng.random(LENGTH) < 0.5
            path = rate_path(is_b, (rng.random(LENGTH) < np.where(is_b, rate, 0.9)).astype(float))
            delays.append(_first_below(path, needed, experiment.min_samples))
        share = float(np.mean(np.array(delays) <= within))
        quantiles = [float(np.quantile(delays, q)) for q in (0.025, 0.5, 0.975)]
        report.results.append(
            collect(f"success 0.90 to {rate:.2f}: rolled back after (95 % of worlds)", "requests", quantiles)
        )
        report.bars.append(
            Bar(f"success 0.90 to {rate:.2f}: rolled back within {within:,} requests", share, 0.95, "min")
        )


def _first_below(path: tuple[Numbers, Numbers, Numbers, Numbers], needed: float, least: int) -> float:
    """Observations until `sequential.rate_below` says that b is worse; infinite when it never does. It is asked where it may
    say so: it exceeds the evidence of a difference by log 2 at most."""
    count_a, total_a, count_b, total_b = path
    worse = total_b / np.maximum(count_b, 1) < total_a / np.maximum(count_a, 1)
    maybe = (rate_evidence(path) + math.log(2) > needed) & worse & (np.minimum(count_a, count_b) >= least)
    for place in np.flatnonzero(maybe):
        a, b = seq.Rate(count_a[place], total_a[place]), seq.Rate(count_b[place], total_b[place])
        if seq.rate_below(a, b) > needed:
            return float(place + 1)
    return math.inf


def _slower(report: Report, worlds: int, _: int) -> None:
    """The p95 of a latency doubles; looked at every 10 requests."""
    needed = seq.surprise(ALPHA)
    for spread in SPREADS:
        rng, delays = np.random.default_rng(5), []
        for _world in range(min(worlds, QUANTILE_WORLDS)):
            arms: tuple[Counter[int], Counter[int]] = Counter(), Counter()
            delay = math.inf
            for number in range(1, 3001):
                which = int(rng.random() < 0.5)
                arms[which][seq.bucket((1 + which) * rng.lognormal(0, spread))] += 1
                if number % 10 == 0 and number >= 2 * MIN_SAMPLES and seq.quantile_above(*arms, 0.95) > needed:
                    delay = number
                    break
            delays.append(delay)
        quantiles = [float(np.quantile(delays, q)) for q in (0.025, 0.5, 0.975)]
        name = f"p95 doubled, latencies of deviation {spread}"
        report.results.append(collect(f"{name}: found after (95 % of worlds)", "requests", quantiles))
        if spread == SPREADS[0]:
            share = float(np.mean(np.array(delays) <= 600))
            report.bars.append(Bar(f"{name}: found within 600 requests", share, 0.95, "min"))


def _assignment(report: Report, _: int, units: int) -> None:
    """The assignment: shares by chi-square, and what moves when a weight does."""
    names = [f"user-{number}" for number in range(units)]
    chances = []
    for share in (1, 10, 25, 50, 90):
        segments = allocate((), {"a": 100.0 - share, "b": share})
        counts = Counter(assign(f"salt {share}", name, segments) for name in names)
        wanted = [units * (100 - share) / 100, units * share / 100]
        chances.append(float(chisquare([counts["a"], counts["b"]], wanted).pvalue))
    report.results.append(collect(f"assignment of {units:,} units, five weights: p of chi-square", "", chances))
    report.bars.append(Bar("assignment: least p of chi-square", min(chances), 0.001, "min"))
    before = allocate((), {"a": 60, "b": 30, "c": 10})
    after = allocate(before, {"a": 50, "b": 30, "c": 20})
    moved = [name for name in names if assign("s", name, before) != assign("s", name, after)]
    wrong = sum((assign("s", name, before), assign("s", name, after)) != ("a", "c") for name in moved)
    edges = sorted({0, *(segment.end for segment in (*before, *after))})
    arms = [[next(x.arm for x in plan if start < x.end) for start in edges[:-1]] for plan in (before, after)]
    parts = sum(end - start for start, end, was, now in zip(edges, edges[1:], *arms, strict=False) if was != now)
    report.results.append(collect("10 % to 20 %: units that move", "%", [100 * len(moved) / units]))
    report.bars.append(
        Bar("10 % to 20 %: parts that move beside the new 10 %", abs(parts - PARTS // 10) + wrong, 0, "max")
    )
