"""Drift: silent while the traffic is what was calibrated on, and loud when it is not."""

from __future__ import annotations

import numpy as np
import pytest

from gearshift.router.drift import ALERT, ENOUGH, Drift, stability_index

QUANTILES = np.quantile(np.random.default_rng(0).normal(size=5000), np.linspace(0, 1, 21)).tolist()


def test_the_index_by_hand() -> None:
    evenly = np.linspace(0, 1, 11).tolist()
    assert stability_index(evenly, [n / 10 + 0.05 for n in range(10)]) == pytest.approx(0.0, abs=0.02)
    # all in the first of ten bins: (1 - 0.1) ln(10) there, and half a row of 100 in each other
    expected = 0.9 * np.log(10) + 9 * (0.005 - 0.1) * np.log(0.005 / 0.1)
    assert stability_index(evenly, [0.01] * 100) == pytest.approx(expected, rel=0.02)


def test_a_scorer_with_few_values_has_an_index_too() -> None:
    assert stability_index([0.2] * 15 + [0.8] * 6, [0.2] * 70 + [0.8] * 30) < 0.05
    assert stability_index([0.2] * 15 + [0.8] * 6, [0.8] * 100) > ALERT


@pytest.mark.parametrize("seed", range(20))
def test_the_same_traffic_never_alerts(seed: int) -> None:
    rng, drift = np.random.default_rng(seed), Drift(QUANTILES, escalated=0.3)
    for score, given_up in zip(rng.normal(size=1500), rng.random(1500) < 0.3, strict=True):
        drift.scored("a", float(score))
        drift.judged("a", bool(given_up))
    assert drift.alerts() == []


def test_other_traffic_alerts_for_its_tenant_alone() -> None:
    rng, drift = np.random.default_rng(1), Drift(QUANTILES, escalated=0.3)
    told = [drift.scored("moved", float(score)) for score in rng.normal(1.0, 1.0, 600)]
    for score in rng.normal(size=600):
        drift.scored("steady", float(score))
    assert told[: ENOUGH - 1] == [None] * (ENOUGH - 1)
    assert len(drift.alerts()) == 1
    assert "tenant moved: its scores differ" in drift.alerts()[0]


def test_answers_given_up_more_often_than_calibrated_alert() -> None:
    drift = Drift(QUANTILES, escalated=0.1)
    for number in range(ENOUGH):
        drift.judged("a", number % 3 == 0)
        assert drift.alerts() == [] or number >= ENOUGH - 1
    assert "34% of its answers are given up, calibrated were 10%" in drift.alerts()[0]
    assert Drift(QUANTILES, escalated=None).alerts() == []
