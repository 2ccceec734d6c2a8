"""Comparisons that stay valid however often one looks. Pure functions of counts and sums.

An e-value is a number that, if nothing differs, exceeds 1 / alpha with probability at most alpha, at any time and whenever
one stops (Ville's inequality); here its logarithm is used. A confidence sequence is an interval that holds at all times at
once; it is what is left when every difference with an e-value above 1 / alpha is struck out.

Rates: universal inference (Wasserman, Ramdas & Balakrishnan 2020, PNAS 117, section 8) with a Jeffreys mixture: exact for
every size of sample, also for scores in 0 to 1, whose likelihood ratio is smaller than that of a coin of the same mean.
Quantiles: the same, on the counts below a value (after Howard & Ramdas 2022, Bernoulli 28, arXiv 1906.09712).
Means: the normal mixture of Robbins with an estimated variance (asymptotic; Waudby-Smith et al. 2024, Annals of Statistics
52, arXiv 2103.06476, theorem 2.2), which is the mSPRT of Johari et al. (arXiv 1512.04922) in another form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincc, betaincinv, betaln, gammaln, xlog1py, xlogy

Numbers = NDArray[np.float64]
TUNED_FOR = 1000
"""Observations at which the interval of a mean is as narrow as it can be."""
GAMMA = 1.02
"""Width of a bucket of a histogram: values are told apart to 2 %."""
NEAR = 40.0
"""How close to a quantile's own share the mixture looks, as outcomes that a Beta prior stands for."""
BISECTIONS = 40
MOST = 10_000_000
"""Observations beyond which "more" is no advice."""


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float

    def without(self, value: float) -> bool:
        return self.low > value or self.high < value


@dataclass(frozen=True, slots=True)
class Rate:
    """`count` outcomes in 0 to 1 with the sum `total`."""

    count: float
    total: float

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Mean:
    """variance: of one observation, not of the mean."""

    count: float
    value: float
    variance: float


def surprise(level: float) -> float:
    """The log e-value at which an error of `level` is called a finding."""
    return math.log(1 / level)


# -- rates


def log_mixture(total: float | Numbers, count: float | Numbers, ones: float = 0.5, zeros: float = 0.5) -> Numbers:
    """Log of the likelihood of the outcomes, averaged over all rates by a Beta prior; by default Jeffreys'."""
    mixed: Numbers = betaln(total + ones, count - total + zeros) - betaln(ones, zeros)
    return mixed


def log_likelihood(total: float | Numbers, count: float | Numbers, rate: float | Numbers) -> Numbers:
    found: Numbers = xlogy(total, rate) + xlog1py(count - total, -np.asarray(rate))
    return found


def rate_differs(a: Rate, b: Rate, difference: float = 0.0) -> float:
    """Log e-value against: b's rate is a's plus `difference`."""
    likeliest = _likeliest(a, b, difference)
    mixed = log_mixture(a.total, a.count) + log_mixture(b.total, b.count)
    return float(
        mixed
        - log_likelihood(a.total, a.count, likeliest)
        - log_likelihood(b.total, b.count, np.clip(likeliest + difference, 0, 1))
    )


def rate_below(a: Rate, b: Rate, margin: float = 0.0) -> float:
    """Log e-value against: b's rate is at least a's less `margin`. Below 0 while b's own rate is."""
    if not a.count or not b.count:
        return 0.0
    if b.value >= a.value - margin:  # what was seen is possible there: then that is the likeliest
        mixed = log_mixture(a.total, a.count) + log_mixture(b.total, b.count)
        return float(mixed - log_likelihood(a.total, a.count, a.value) - log_likelihood(b.total, b.count, b.value))
    return rate_differs(a, b, -margin) + math.log(2 * max(_chance_below(a, b), 1e-9))


def preference_below(seen: Rate, margin: float = 0.0) -> float:
    """Log e-value against: who compares prefers it in a half of the pairs, less `margin`, or more. Below 0 while it is so."""
    if not seen.count:
        return 0.0
    least = 0.5 - margin
    likeliest = max(seen.value, least)
    mixed = float(log_mixture(seen.total, seen.count))  # over all rates, and from here over those below `least`
    below = betainc(seen.total + 0.5, seen.count - seen.total + 0.5, least) / betainc(0.5, 0.5, least)
    return mixed + math.log(max(below, 1e-300)) - float(log_likelihood(seen.total, seen.count, likeliest))


def preference_interval(seen: Rate, alpha: float) -> Interval:
    """Confidence sequence of the preference less a half."""
    if not seen.count:
        return Interval(-0.5, 0.5)
    mixed = float(log_mixture(seen.total, seen.count))

    def against(share: float) -> float:
        return mixed - float(log_likelihood(seen.total, seen.count, share))

    found = _interval(against, seen.value, 0.0, 1.0, alpha)
    return Interval(found.low - 0.5, found.high - 0.5)


def _chance_below(a: Rate, b: Rate) -> float:
    """Posterior chance, from Jeffreys' prior, that b's rate is below a's; from below, by a sum over a's quantiles. Twice it
    turns the mixture over all rates into one over those where b's is lower, which is all that a one-sided test looks for."""
    quantiles = betaincinv(a.total + 0.5, a.count - a.total + 0.5, np.arange(256) / 256)
    return float(betainc(b.total + 0.5, b.count - b.total + 0.5, quantiles).mean())


def rate_interval(a: Rate, b: Rate, alpha: float) -> Interval:
    """Confidence sequence of b's rate less a's."""
    if not a.count or not b.count:
        return Interval(-1.0, 1.0)
    return _interval(lambda shift: rate_differs(a, b, shift), b.value - a.value, -1.0, 1.0, alpha)


def _likeliest(a: Rate, b: Rate, difference: float) -> float:
    """The rate of a at which the outcomes are likeliest when b's is `difference` more; the sum is concave in it."""
    low, high = max(0.0, -difference), min(1.0, 1.0 - difference)
    if difference == 0:
        return (a.total + b.total) / (a.count + b.count)

    def slope(rate: float) -> float:
        tiny = 1e-300
        other = rate + difference
        return (
            a.total / max(rate, tiny)
            - (a.count - a.total) / max(1 - rate, tiny)
            + b.total / max(other, tiny)
            - (b.count - b.total) / max(1 - other, tiny)
        )

    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if slope(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


# -- means


def mean_interval(a: Mean, b: Mean, alpha: float) -> Interval:
    """Confidence sequence of b's mean less a's."""
    if a.count < 2 or b.count < 2:
        return Interval(-math.inf, math.inf)
    width = half_width(a.count + b.count, a.variance / a.count + b.variance / b.count, alpha)
    return Interval(b.value - a.value - width, b.value - a.value + width)


def half_width(count: float | Numbers, error: float | Numbers, alpha: float) -> float:
    """count: observations; error: the variance of the estimate that they gave."""
    rho2 = (2 * math.log(1 / alpha) + math.log(2 * math.log(1 / alpha) + 1)) / TUNED_FOR
    wide = np.sqrt(error * 2 * (count * rho2 + 1) / (count * rho2) * np.log(np.sqrt(count * rho2 + 1) / alpha))
    return wide if isinstance(wide, np.ndarray) else float(wide)  # type: ignore[return-value]


# -- quantiles


def bucket(value: float) -> int:
    """The bucket of a positive value: the k with GAMMA^(k-1) < value <= GAMMA^k."""
    return math.ceil(math.log(max(value, 1e-9)) / math.log(GAMMA))


def quantile_above(a: Mapping[int, float], b: Mapping[int, float], q: float, shift: int = 0) -> float:
    """Log e-value against: b's q-quantile is at most a's times GAMMA^shift. a, b: counts by bucket.

    If it is, then there is a value below which a has less than q and up to which b has at least q: a's quantile. Each value
    is tested by both arms together, and the least of the e-values counts, as nobody knows which value it is.
    """
    if not a or not b:
        return 0.0
    shifted = {place + shift: count for place, count in a.items()}
    places = range(min([*shifted, *b]), max([*shifted, *b]) + 2)
    of_a = np.cumsum([shifted.get(place, 0.0) for place in places])
    of_b = np.cumsum([b.get(place, 0.0) for place in places])
    below_a = np.concatenate([[0.0], of_a[:-1]])
    return float(np.min(_more_below(below_a, of_a[-1], q) + _fewer_below(of_b, of_b[-1], q)))


def _more_below(below: Numbers, count: float, q: float) -> Numbers:
    """Log e-value against: a share of at most q lies below."""
    return _one_sided(below, count, q) - log_likelihood(below, count, np.minimum(below / count, q))


def _fewer_below(below: Numbers, count: float, q: float) -> Numbers:
    """Log e-value against: a share of at least q lies below."""
    return _more_below(count - below, count, 1 - q)


def _one_sided(total: Numbers, count: float, q: float) -> Numbers:
    """Log of the likelihood, averaged over rates close to q: nearly all of them above it, where the alternative is, and some
    on both sides, so that outcomes far below cost little."""
    ones, zeros = NEAR * q, NEAR * (1 - q)
    both = log_mixture(total, count, ones, zeros)
    with np.errstate(divide="ignore"):
        above = both + np.log(betaincc(total + ones, count - total + zeros, q) / betaincc(ones, zeros, q))
    mixed: Numbers = np.logaddexp(math.log(0.9) + above, math.log(0.1) + both)
    return mixed


def quantile_interval(a: Mapping[int, float], b: Mapping[int, float], q: float, alpha: float) -> Interval:
    """Confidence sequence of the ratio of b's q-quantile to a's; `alpha` / 2 for each side."""
    if not a or not b:
        return Interval(0.0, math.inf)
    wanted = surprise(alpha / 2)
    reach = max([*a, *b]) - min([*a, *b]) + 1
    low = _last_shift(lambda shift: quantile_above(a, b, q, shift) >= wanted, -reach, reach)
    high = _last_shift(lambda shift: quantile_above(b, a, q, shift) >= wanted, -reach, reach)
    return Interval(
        0.0 if low is None else GAMMA**low,
        math.inf if high is None else GAMMA**-high,
    )


def quantile(counts: Mapping[int, float], q: float) -> float:
    """The upper end of the bucket that it falls into; nan for no values."""
    total, seen = sum(counts.values()), 0.0
    for place in sorted(counts):
        seen += counts[place]
        if seen >= q * total:
            return GAMMA**place
    return math.nan


def _last_shift(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The greatest shift at which it holds; it holds up to some shift and not beyond. None when not even at `low`."""
    if not holds(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


# -- whether the arms got their share


def shares_differ(counts: Sequence[float], shares: Sequence[float]) -> float:
    """Log e-value against: units came to the arms by `shares` (Lindon & Malek 2022, arXiv 2011.03567, with a flat prior)."""
    kept = [(count, share) for count, share in zip(counts, shares, strict=True) if share > 0]
    if any(count for count, share in zip(counts, shares, strict=True) if share <= 0):
        return math.inf
    seen, wanted = np.array([count for count, _ in kept]), np.array([share for _, share in kept])
    wanted = wanted / wanted.sum()
    mixed = gammaln(len(kept)) - gammaln(seen.sum() + len(kept)) + gammaln(seen + 1).sum()
    return float(mixed - xlogy(seen, wanted).sum())


# -- how many more


def more_until(decided: Callable[[float], bool], count: float) -> int | None:
    """Observations that are missing if what comes is like what came: `decided` is asked with everything seen times a factor.
    None when not even many would do."""
    factor = 1.0
    while not decided(factor):
        factor *= 2
        if factor * count > MOST:
            return None
    low, high = factor / 2, factor
    for _ in range(6):  # it is advice, not a promise
        middle = (low + high) / 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return math.ceil(max(0.0, high - 1) * count)


def _interval(against: Callable[[float], float], center: float, low: float, high: float, alpha: float) -> Interval:
    """What is not struck out round `center`; `against` grows with the distance from it."""
    wanted = surprise(alpha)

    def edge(outer: float) -> float:
        if against(outer) < wanted:
            return outer
        inner = center
        for _ in range(BISECTIONS // 2):
            middle = (inner + outer) / 2
            inner, outer = (inner, middle) if against(middle) >= wanted else (middle, outer)
        return outer

    return Interval(edge(low), edge(high))
