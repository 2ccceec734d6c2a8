"""The choice of a tier: hard rules, N tiers, load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.router.policy import Asked, Route, TierFacts, choose, gains_of, named, pressed, price_steps, rules

CHEAP = TierFacts("cheap", 1, 2, context=1000, abilities=frozenset({"json"}))
MIDDLE = TierFacts("middle", 2, 4, context=4000, abilities=frozenset({"json", "tools"}))
BEST = TierFacts("best", 10, 20)
TIERS = (CHEAP, MIDDLE, BEST)


def pick(gains: tuple[float, ...], threshold: float, tiers: tuple[TierFacts, ...] = TIERS) -> Route:
    steps = named(tiers, price_steps(tiers, Asked()))
    return choose(tiers, named(tiers, gains), steps, threshold)


def test_with_two_tiers_the_threshold_itself_belongs_to_the_expensive_one() -> None:
    two = (CHEAP, BEST)
    assert pick((0.0, 0.5), 0.5, two) == Route("best", "score:0.500>=0.5", 0.5, ("cheap",))
    assert pick((0.0, 0.499), 0.5, two) == Route("cheap", "score:0.499<0.5", 0.499, ("best",))


def test_a_tier_between_is_taken_when_it_is_worth_its_part_of_the_price() -> None:
    # the middle costs a ninth of the step from the cheapest to the best
    assert pick((0.0, 0.3, 0.35), 0.6).tier == "middle"
    assert pick((0.0, 0.05, 0.1), 0.6).tier == "cheap"
    assert pick((0.0, 0.1, 0.9), 0.6).tier == "best"
    assert pick((0.0, 0.3, 0.35), 0.6).others == ("cheap", "best")


@given(st.floats(-1, 1), st.floats(0, 1))
def test_one_score_never_asks_for_more_than_the_best_tier_is_worth(score: float, threshold: float) -> None:
    gains = gains_of(score, (CHEAP, BEST))
    assert (pick(gains, threshold, (CHEAP, BEST)).tier == "best") == (score >= threshold)


def test_tiers_between_get_their_share_of_one_score_by_their_quality() -> None:
    known = (TierFacts("a", quality=0.5), TierFacts("b", quality=0.8), TierFacts("c", quality=0.9))
    assert gains_of(0.4, known) == pytest.approx((0.0, 0.3, 0.4))
    assert gains_of(0.4, TIERS) == pytest.approx((0.0, 0.2, 0.4))
    assert gains_of(0.4, (BEST,)) == (0.0,)


def test_without_prices_tiers_cost_their_place() -> None:
    free = tuple(TierFacts(name) for name in "abc")
    assert price_steps(free, Asked()) == (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("asked", "left", "decided"),
    [
        (Asked(), ["cheap", "middle", "best"], ""),
        (Asked(forced="middle"), ["middle"], "forced"),
        (Asked(forced="middle", pinned="cheap"), ["cheap"], "pinned"),
        (Asked(forced="best", allowed=frozenset({"cheap"})), ["cheap"], "rule:allow-list"),
        (Asked(pinned="cheap", needs=frozenset({"tools"})), ["cheap"], "pinned"),
        (Asked(prompt_tokens=900, wished_tokens=200), ["middle", "best"], ""),
        (Asked(prompt_tokens=5000), ["best"], "rule:context"),
        (Asked(needs=frozenset({"tools"})), ["middle", "best"], ""),
        (Asked(needs=frozenset({"vision"})), ["best"], "rule:abilities"),
        (
            Asked(allowed=frozenset({"cheap", "middle"}), needs=frozenset({"tools"})),
            ["middle"],
            "rule:allow-list+abilities",
        ),
        (Asked(allowed=frozenset({"cheap"}), prompt_tokens=9000), ["cheap"], "rule:allow-list"),
    ],
)
def test_hard_rules_come_first_and_say_so(asked: Asked, left: list[str], decided: str) -> None:
    ruled = rules(TIERS, asked)
    assert ([tier.name for tier in ruled.tiers], ruled.decided) == (left, decided)


def test_load_raises_the_threshold_within_its_bound_and_it_goes_back() -> None:
    assert [round(pressed(0.4, load, 0.5, 0.2), 3) for load in (0.0, 0.5, 0.75, 1.0, 7.0, 0.0)] == [
        0.4, 0.4, 0.5, 0.6, 0.6, 0.4,
    ]  # fmt: skip
