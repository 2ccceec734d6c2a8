from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.eval import sequential as seq
from gearshift.eval.bench_eval import rate_evidence, rate_path
from gearshift.eval.sequential import Mean, Rate

counts = st.integers(1, 300)


def rate(count: int, share: float) -> Rate:
    return Rate(count, round(share * count))


@given(counts, counts, st.floats(0, 1), st.floats(0, 1))
def test_the_interval_of_a_difference_is_what_is_not_struck_out(n: int, m: int, p: float, q: float) -> None:
    a, b = rate(n, p), rate(m, q)
    interval = seq.rate_interval(a, b, 0.05)
    assert -1 <= interval.low <= b.value - a.value + 1e-9
    assert b.value - a.value - 1e-9 <= interval.high <= 1
    for edge, outside in ((interval.low, -1e-3), (interval.high, 1e-3)):
        if abs(edge) < 0.99:
            assert seq.rate_differs(a, b, edge) == pytest.approx(seq.surprise(0.05), abs=0.2)
            assert seq.rate_differs(a, b, edge + outside) >= seq.surprise(0.05)


def test_the_likeliest_common_rate_is_found() -> None:
    a, b = Rate(40, 30), Rate(60, 20)
    grid = np.linspace(1e-6, 0.7 - 1e-6, 20_001)
    likelihood = seq.log_likelihood(a.total, a.count, grid) + seq.log_likelihood(b.total, b.count, grid + 0.3)
    mixed = seq.log_mixture(a.total, a.count) + seq.log_mixture(b.total, b.count)
    assert seq.rate_differs(a, b, 0.3) == pytest.approx(float(mixed - likelihood.max()), abs=1e-4)


def test_an_e_value_is_an_e_value() -> None:
    """Its mean over everything that can happen is at most 1, whatever the common rate: summed up, not sampled."""
    n, m = 12, 9
    for p in (0.05, 0.3, 0.5, 0.9):
        both = below = 0.0
        for i in range(n + 1):
            for j in range(m + 1):
                chance = math.comb(n, i) * math.comb(m, j) * p ** (i + j) * (1 - p) ** (n + m - i - j)
                both += chance * math.exp(seq.rate_differs(Rate(n, i), Rate(m, j)))
                below += chance * math.exp(seq.rate_below(Rate(n, i), Rate(m, j)))
        assert both <= 1
        assert below <= 1


def test_scores_between_right_and_wrong_are_judged_with_more_care() -> None:
    """Half points have the same mean as coins and less spread: the evidence of the same sums is the same."""
    assert seq.rate_below(Rate(50, 45.5), Rate(50, 20.5)) == pytest.approx(
        (seq.rate_below(Rate(50, 45), Rate(50, 20)) + seq.rate_below(Rate(50, 46), Rate(50, 21))) / 2, abs=0.1
    )


def test_nothing_is_worse_while_it_is_better_or_within_the_margin() -> None:
    assert seq.rate_below(Rate(100, 80), Rate(100, 90)) < 0
    assert seq.rate_below(Rate(1000, 900), Rate(1000, 850), margin=0.1) < 0
    assert seq.rate_below(Rate(1000, 900), Rate(1000, 700), margin=0.1) > seq.surprise(0.05)
    assert seq.rate_below(Rate(0, 0), Rate(10, 1)) == 0


def test_the_bench_s_arrays_say_the_same_as_what_decides() -> None:
    rng = np.random.default_rng(0)
    path = rate_path(rng.random(300) < 0.5, (rng.random(300) < 0.7).astype(float))
    evidence = rate_evidence(path)
    for place in range(20, 300, 7):
        a, b = Rate(path[0][place], path[1][place]), Rate(path[2][place], path[3][place])
        assert evidence[place] == pytest.approx(seq.rate_differs(a, b))


def test_the_interval_of_a_mean_narrows_and_covers() -> None:
    rng, missed = np.random.default_rng(1), 0
    for _ in range(200):
        values = rng.normal(0, 1, (2, 3000))
        n = np.arange(30, 3001, 10)
        means = np.cumsum(values, axis=1)[:, n - 1] / n
        widths = np.array([seq.half_width(2.0 * float(count), 2.0 / float(count), 0.05) for count in n])
        missed += bool((np.abs(means[1] - means[0]) > widths).any())
    assert missed <= 20
    wide, narrow = (seq.mean_interval(Mean(k, 1.0, 1.0), Mean(k, 1.1, 1.0), 0.05) for k in (100, 10_000))
    assert not wide.without(0)
    assert narrow.without(0)


def test_a_doubled_quantile_is_found_and_its_ratio_covered() -> None:
    rng = np.random.default_rng(2)
    a, b = (Counter(seq.bucket(x) for x in scale * rng.lognormal(0, 0.5, 500)) for scale in (1, 2))
    assert seq.quantile_above(a, b, 0.95) > seq.surprise(0.05)
    assert seq.quantile_above(b, a, 0.95) < 0
    interval = seq.quantile_interval(a, b, 0.95, 0.05)
    assert 1.1 < interval.low < 2 < interval.high < 4
    assert seq.quantile_above(a, b, 0.95, shift=round(math.log(1.9) / math.log(seq.GAMMA))) < seq.surprise(0.05)


def test_a_quantile_of_buckets_is_within_a_bucket() -> None:
    values = np.random.default_rng(3).lognormal(0, 1, 2000)
    counts = Counter(seq.bucket(x) for x in values)
    assert seq.quantile(counts, 0.95) / np.quantile(values, 0.95) == pytest.approx(1, abs=0.05)
    assert math.isnan(seq.quantile({}, 0.95))


def test_arms_that_did_not_get_their_share_are_noticed() -> None:
    assert seq.shares_differ([5000, 5000], [1, 1]) < 0
    assert seq.shares_differ([5300, 4700], [1, 1]) > seq.surprise(0.001)
    assert seq.shares_differ([9500, 500], [95, 5]) < 0
    assert seq.shares_differ([10, 1], [1, 0]) == math.inf


def test_more_is_about_what_is_missing() -> None:
    def decided(factor: float) -> bool:
        return seq.rate_below(Rate(100 * factor, 90 * factor), Rate(100 * factor, 85 * factor)) > 3

    more = seq.more_until(decided, 200)
    assert more is not None
    assert decided(1 + more / 200)
    assert not decided(1 + 0.95 * more / 200)
    assert seq.more_until(lambda factor: False, 200) is None
    assert seq.more_until(lambda factor: True, 200) == 0


def test_a_preference_is_tested_against_a_half_and_counts_ties() -> None:
    """Its mean over everything that can happen is at most 1 at the edge of what it is held against: summed up over pairs that are
    won, lost or tied."""
    n = 12
    for tie in (0.0, 0.4):
        both = below = 0.0
        for won in range(n + 1):
            for lost in range(n + 1 - won):
                ties = n - won - lost
                ways = math.comb(n, won) * math.comb(n - won, lost)
                chance = ways * ((1 - tie) / 2) ** (won + lost) * tie**ties
                seen = Rate(n, won + ties / 2)
                below += chance * math.exp(seq.preference_below(seen))
                mixed = seq.log_mixture(seen.total, n) - seq.log_likelihood(seen.total, n, 0.5)
                both += chance * math.exp(float(mixed))
        assert both <= 1 + 1e-9
        assert below <= 1 + 1e-9


def test_a_preference_that_is_surely_lost_is_found() -> None:
    assert seq.preference_below(Rate(60, 15)) > seq.surprise(0.05)
    assert seq.preference_below(Rate(60, 15), margin=0.25) < 0
    assert seq.preference_below(Rate(60, 45)) < 0
    interval = seq.preference_interval(Rate(200, 150), 0.05)
    assert 0 < interval.low < 0.25 < interval.high < 0.5
