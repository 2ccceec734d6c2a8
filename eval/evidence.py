"""What was seen of each arm, in sums that can be stored, and what follows from it. Values and pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gearshift.eval import sequential as seq
from gearshift.eval.scores import MEASURES, Measured, Score
from gearshift.eval.sequential import Interval, Mean, Rate

P95 = 0.95
DRIFT_LEAST = 100
"""Values of a measure on each side, before its drift is looked at."""
Verdict = Literal["better", "worse", "can't tell yet", "too few", "not measured"]


class Tally(msgspec.Struct, omit_defaults=True):
    """One measure of one arm. `sum`, `squares`: of the values. `buckets`: values by their bucket, for a quantile.

    `unit_*`: sums over units (users) of (sum of their values)^2, (number of their values)^2 and the product, which tell how
    alike the values of one unit are.

    `before*`: the same of what a unit was like before the experiment: the distance of its mean then from everybody's, once for
    each of its values now; 0 for a unit that was not there. Sum, and over units squares, products with values and with counts.
    """

    count: int = 0
    unscored: int = 0
    sum: float = 0.0
    squares: float = 0.0
    buckets: dict[int, int] = {}
    unit_values: float = 0.0
    unit_counts: float = 0.0
    unit_products: float = 0.0
    before: float = 0.0
    before_squares: float = 0.0
    before_values: float = 0.0
    before_counts: float = 0.0

    def add(self, measured: Measured, score: Score, before: Seen | None, distance: float = 0.0) -> Seen | None:
        """`before`: what the unit had scored so far, or None where units are not followed. `distance`: of what the unit was like
        before the experiment. Returns what it has scored now."""
        value = score.value
        if value is None or not math.isfinite(value):
            self.unscored += 1
            return before
        self.count += 1
        self.sum += value
        self.squares += value * value
        if measured.kind == "p95":
            place = seq.bucket(value)
            self.buckets[place] = self.buckets.get(place, 0) + 1
        total, times = before or (0.0, 0)
        after = total + value, times + 1
        self.unit_values += after[0] ** 2 - total**2
        self.unit_counts += after[1] ** 2 - times**2
        self.unit_products += after[0] * after[1] - total * times
        if distance:
            self.before += distance
            self.before_squares += distance**2 * (after[1] ** 2 - times**2)
            self.before_values += distance * (after[0] * after[1] - total * times)
            self.before_counts += distance * (after[1] ** 2 - times**2)
        return after

    def take_in(self, other: Tally) -> None:
        """Adds what another one has seen of other units."""
        self.count += other.count
        self.unscored += other.unscored
        self.sum += other.sum
        self.squares += other.squares
        for place, count in other.buckets.items():
            self.buckets[place] = self.buckets.get(place, 0) + count
        self.unit_values += other.unit_values
        self.unit_counts += other.unit_counts
        self.unit_products += other.unit_products
        self.before += other.before
        self.before_squares += other.before_squares
        self.before_values += other.before_values
        self.before_counts += other.before_counts

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    @property
    def variance(self) -> float:
        if self.count < 2:
            return 0.0
        return max(0.0, (self.squares - self.count * self.mean**2) / (self.count - 1))

    @property
    def design_effect(self) -> float:
        """How many times the variance of the mean is what independent values would give (Rao & Scott 1981, JASA 76): values
        of one user are alike. By the delta method for a ratio of sums over units; at least 1."""
        independent = self.variance / self.count if self.count else 0.0
        if independent <= 0:
            return 1.0
        return max(1.0, self.residuals / self.count**2 / independent)

    @property
    def residuals(self) -> float:
        """Sum over units of (their values less the mean)^2."""
        return self.unit_values - 2 * self.mean * self.unit_products + self.mean**2 * self.unit_counts

    @property
    def distance(self) -> float:
        """Mean distance before the experiment."""
        return self.before / self.count if self.count else 0.0

    @property
    def covariance(self) -> float:
        """Sum over units of the products of what is left of values and of distances."""
        left = self.before_values - self.mean * self.before_counts
        return left - self.distance * (self.unit_products - self.mean * self.unit_counts)

    @property
    def distance_residuals(self) -> float:
        return self.before_squares - 2 * self.distance * self.before_counts + self.distance**2 * self.unit_counts


Seen = tuple[float, int]
"""Of one unit: the sum and the number of its values."""


class Arm(msgspec.Struct, omit_defaults=True):
    exposures: int = 0
    units: int = 0
    tallies: dict[str, Tally] = {}
    shadows: int = 0
    """Answers that nobody saw."""


class Evidence(msgspec.Struct, omit_defaults=True):
    """Of one experiment in one period."""

    period: int = 0
    arms: dict[str, Arm] = {}
    first_at: float = 0.0
    last_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm beside the baseline. `difference`: of rates and means; a ratio for quantiles. `more`: exposures that are about
    missing until it can be told, if it goes on like this; None when that is no help."""

    measure: str
    arm: str
    verdict: Verdict
    baseline_value: float
    value: float
    interval: Interval
    more: int | None = None
    count: int = 0
    explained: float = 0.0
    """Share of the variance that what users were like before explains, and that the interval is narrower by."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How an experiment is read."""

    baseline: str
    measures: tuple[str, ...]
    guards: Mapping[str, float] = field(default_factory=dict)
    alpha: float = 0.05
    min_samples: int = 30
    looks: int = 1
    """Periods with a chance of their own to err: the stages of a rollout."""


@dataclass(frozen=True, slots=True)
class Fallen:
    """A guard that is surely worse. log_e: of the evidence; needed: what it had to exceed."""

    arm: str
    measure: str
    baseline_value: float
    value: float
    margin: float
    log_e: float
    needed: float

    def __str__(self) -> str:
        margin = f" (margin {self.margin:g})" if self.margin else ""
        return (
            f"{self.measure} {self.value:.4g} against {self.baseline_value:.4g}{margin}, "
            f"e-value {math.exp(min(self.log_e, 700)):.3g} over {math.exp(self.needed):.3g}"
        )


def fallen(plan: Plan, evidence: Evidence) -> list[Fallen]:
    """Guards that are surely worse than the baseline, in any arm. The chance that this ever names one that is not, in all
    measures, arms and periods together, is at most alpha (exactly for rates and quantiles of independent units)."""
    found = []
    others = [arm for arm in evidence.arms if arm != plan.baseline]
    needed = seq.surprise(plan.alpha / max(1, len(plan.guards) * len(others) * plan.looks))
    for measure, arm, base, other in _pairs(plan, evidence, plan.guards):
        margin = plan.guards[measure]
        log_e = worse(MEASURES[measure], base, other, margin)
        if log_e > needed:
            before = 0.5 if MEASURES[measure].kind == "preference" else value_of(MEASURES[measure], base)
            values = before, value_of(MEASURES[measure], other)
            found.append(Fallen(arm, measure, *values, margin, log_e, needed))
    return found


def worse(measured: Measured, base: Tally, other: Tally, margin: float) -> float:
    """Log e-value against: `other` is no worse than `base` by more than the margin."""
    if measured.kind == "preference":
        return seq.preference_below(_rate(other), margin)
    if measured.kind == "rate":
        a, b = _rate(base), _rate(other)
        if measured.better == "lower":
            a, b = _rest(a), _rest(b)
        return seq.rate_below(a, b, margin)
    if measured.kind == "p95":
        shift = math.ceil(math.log1p(margin) / math.log(seq.GAMMA)) if margin else 0
        return seq.quantile_above(_thinned(base), _thinned(other), P95, shift)
    tolerated = margin * abs(base.mean)
    mine, theirs, _ = adjusted(base, other)
    gap = theirs.value - mine.value if measured.better == "lower" else mine.value - theirs.value
    error = sum(each.variance / each.count for each in (mine, theirs) if each.count)
    return mean_above(base.count + other.count, gap - tolerated, error)


def mean_above(count: int, gap: float, error: float) -> float:
    """Log e-value of a gap of means, one-sided: from the confidence sequence that would just strike it out."""
    if gap <= 0 or error <= 0 or count < 2:
        return 0.0
    low, high = 0.0, 500.0
    for _ in range(seq.BISECTIONS):
        middle = (low + high) / 2
        if gap > seq.half_width(count, error, min(0.999, 2 * math.exp(-middle))):
            low = middle
        else:
            high = middle
    return low


def compare(plan: Plan, evidence: Evidence) -> list[Comparison]:
    """Every measure of every arm beside the baseline's; all intervals hold together, at all times, with 1 - alpha."""
    others = max(1, sum(arm != plan.baseline for arm in evidence.arms))
    alpha = plan.alpha / (max(1, len(plan.measures)) * others)
    return [_compared(plan, alpha, *pair) for pair in _pairs(plan, evidence, plan.measures, all_of_them=True)]


def _compared(plan: Plan, alpha: float, name: str, arm: str, base: Tally, other: Tally) -> Comparison:
    measured = MEASURES[name]
    neutral = 1.0 if measured.kind == "p95" else 0.0
    interval = interval_of(measured, base, other, alpha)
    values = value_of(measured, base), value_of(measured, other)
    least = min(base.count, other.count)
    if measured.kind == "preference":
        values, least = (0.5, values[1]), other.count
    verdict: Verdict = "can't tell yet"
    more = None
    if not least:
        verdict = "not measured"
    elif least < plan.min_samples:
        verdict, more = "too few", 2 * (plan.min_samples - least)
    elif interval.without(neutral):
        higher = interval.low > neutral
        verdict = "better" if higher == (measured.better == "higher") else "worse"
    else:
        more = seq.more_until(
            lambda factor: interval_of(measured, _times(base, factor), _times(other, factor), alpha).without(neutral),
            least if measured.kind == "preference" else base.count + other.count,
        )
    explained = adjusted(base, other)[2] if measured.kind == "mean" else 0.0
    return Comparison(name, arm, verdict, *values, interval, more, other.count, explained)


def adjusted(base: Tally, other: Tally) -> tuple[Mean, Mean, float]:
    """Both means, less what is explained by what their users were like before the experiment, and the share of the variance
    that this takes away (CUPED: Deng, Xu, Kohavi & Walker 2013, WSDM, section 3; for ratios of sums over users by the delta
    method, as in their appendix B). The slope is one for both arms, so that it says nothing about their difference."""
    spread = base.distance_residuals + other.distance_residuals
    slope = (base.covariance + other.covariance) / spread if spread > 0 else 0.0
    found, before, after = [], 0.0, 0.0
    for tally in (base, other):
        whole = tally.residuals
        left = whole - 2 * slope * tally.covariance + slope**2 * tally.distance_residuals
        share = max(0.0, left / whole) if slope and whole > 0 else 1.0
        before, after = before + whole, after + whole * share
        variance = tally.variance * tally.design_effect * share
        found.append(Mean(tally.count, tally.mean - slope * tally.distance, variance))
    return found[0], found[1], 1 - after / before if slope and before > 0 else 0.0


def interval_of(measured: Measured, base: Tally, other: Tally, alpha: float) -> Interval:
    """Of the difference, or the ratio of quantiles, or of the preference less a half."""
    if measured.kind == "preference":
        return seq.preference_interval(_rate(other), alpha)
    if measured.kind == "rate":
        return seq.rate_interval(_rate(base), _rate(other), alpha)
    if measured.kind == "p95":
        return seq.quantile_interval(_thinned(base), _thinned(other), P95, alpha)
    a, b, _ = adjusted(base, other)
    return seq.mean_interval(a, b, alpha)


def value_of(measured: Measured, tally: Tally) -> float:
    return seq.quantile(tally.buckets, P95) if measured.kind == "p95" else tally.mean


def shares_differ(evidence: Evidence, shares: Mapping[str, float], alpha: float = 0.001) -> float | None:
    """The log e-value against "units came to the arms by their shares", when that is beyond doubt. Then something else than
    the assignment decides who is counted, and no other number can be trusted (sample ratio mismatch)."""
    arms = [arm for arm in shares if shares[arm] > 0 or arm in evidence.arms]
    if len(arms) < 2:
        return None
    counts = [evidence.arms[arm].units if arm in evidence.arms else 0 for arm in arms]
    log_e = seq.shares_differ(counts, [shares[arm] for arm in arms])
    return log_e if log_e > seq.surprise(alpha) else None


def drifted(past: Mapping[str, Tally], recent: Mapping[str, Tally], alpha: float) -> dict[str, str]:
    """Measures of a release that are surely worse in its last requests than in those before, and by how much. `alpha`: chance of
    naming any, for one such look."""
    both = [name for name in recent if name in past and min(past[name].count, recent[name].count) >= DRIFT_LEAST]
    found = {}
    for name in both:
        measured = MEASURES[name]
        if worse(measured, past[name], recent[name], 0.0) > seq.surprise(alpha / len(both)):
            now, before = value_of(measured, recent[name]), value_of(measured, past[name])
            found[name] = f"{name} {now:.4g} in the last {recent[name].count}, {before:.4g} before"
    return found


def _pairs(
    plan: Plan, evidence: Evidence, measures: Iterable[str], all_of_them: bool = False
) -> list[tuple[str, str, Tally, Tally]]:
    """Measure, arm, and the tallies of the baseline and the arm; without `all_of_them` only where both have enough."""
    found = []
    baseline = evidence.arms.get(plan.baseline, Arm()).tallies
    for measure in measures:
        for name, arm in evidence.arms.items():
            if name == plan.baseline:
                continue
            base, other = baseline.get(measure, Tally()), arm.tallies.get(measure, Tally())
            least = other.count if MEASURES[measure].kind == "preference" else min(base.count, other.count)
            if all_of_them or least >= plan.min_samples:
                found.append((measure, name, base, other))
    return found


def _rate(tally: Tally) -> Rate:
    """Counted as if independent: as many values as say as much."""
    effect = tally.design_effect
    return Rate(tally.count / effect, tally.sum / effect)


def _rest(rate: Rate) -> Rate:
    return Rate(rate.count, rate.count - rate.total)


def _thinned(tally: Tally) -> dict[int, float]:
    effect = tally.design_effect
    return {place: count / effect for place, count in tally.buckets.items()}


def _times(tally: Tally, factor: float) -> Tally:
    """As if everything had come so many times."""
    return Tally(
        count=round(tally.count * factor),
        sum=tally.sum * factor,
        squares=tally.squares * factor,
        buckets={place: round(count * factor) for place, count in tally.buckets.items()},
        unit_values=tally.unit_values * factor,
        unit_counts=tally.unit_counts * factor,
        unit_products=tally.unit_products * factor,
        before=tally.before * factor,
        before_squares=tally.before_squares * factor,
        before_values=tally.before_values * factor,
        before_counts=tally.before_counts * factor,
    )
