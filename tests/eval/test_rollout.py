from __future__ import annotations

import random
from typing import Any

import pytest

from gearshift.eval import evidence as ev
from gearshift.eval.evidence import Arm, Evidence, Tally
from gearshift.eval.rollout import Alert, Hold, decide, plan_of
from gearshift.eval.scores import MEASURES, Score, feedback_value
from gearshift.eval.scores import valid as valid_score
from gearshift.platform.config import Experiment, Rollout
from gearshift.platform.samples import Feedback, Sample
from gearshift.router.arms import begin
from gearshift.router.trials import Advance, RollBack


def experiment(**settings: Any) -> Experiment:
    return Experiment(arms={"a": 1.0, "b": 1.0}, **settings)


def tally(measure: str, values: list[float]) -> Tally:
    found = Tally()
    for value in values:
        found.add(MEASURES[measure], Score(value), None)
    return found


def rates(good: int, bad: int) -> Tally:
    return tally("feedback", [1.0] * good + [0.0] * bad)


def evidence(a: dict[str, Tally], b: dict[str, Tally], period: int = 0) -> Evidence:
    arms = {
        name: Arm(exposures=(n := max(t.count for t in tallies.values())), units=n, tallies=tallies)
        for name, tallies in (("a", a), ("b", b))
    }
    return Evidence(period, arms)


BAD = evidence({"feedback": rates(90, 10)}, {"feedback": rates(40, 60)})
EVEN = evidence({"feedback": rates(90, 10)}, {"feedback": rates(88, 12)})


def test_a_guard_that_is_surely_worse_rolls_back_and_says_by_what() -> None:
    found = decide(experiment(), begin(experiment()), BAD, 10.0)
    assert isinstance(found, RollBack)
    assert found.arms == ("b",)
    assert found.why.startswith("b: feedback 0.4 against 0.9, e-value")
    assert decide(experiment(), begin(experiment()), EVEN, 10.0) == Hold("no rollout")


@pytest.mark.parametrize(
    "settings",
    [
        {"guards": {"error": 0.0}},
        {"guards": {"feedback": 0.6}},
        {"min_samples": 200},
        {"min_time_s": 60.0},
    ],
)
def test_what_is_no_guard_or_within_its_margin_or_too_early_does_not(settings: dict[str, Any]) -> None:
    wanted = experiment(**settings)
    assert isinstance(decide(wanted, begin(wanted), BAD, 10.0), Hold)


def test_it_can_be_left_to_a_person() -> None:
    wanted = experiment(on_worse="alert")
    assert isinstance(decide(wanted, begin(wanted), BAD, 10.0), Alert)


def test_evidence_of_other_weights_decides_nothing() -> None:
    assert isinstance(decide(experiment(), begin(experiment()), Evidence(3, BAD.arms), 10.0), Hold)


def test_an_a_a_test_is_never_rolled_back() -> None:
    wanted = Experiment(arms={"a": 1.0}, aa=True)
    arms = {"a": BAD.arms["a"], "a (again)": BAD.arms["b"]}
    assert isinstance(decide(wanted, begin(wanted), Evidence(0, arms), 10.0), Hold)
    verdicts = {each.measure: each.verdict for each in ev.compare(plan_of(wanted), Evidence(0, arms))}
    assert verdicts["feedback"] == "worse"


def test_a_rollout_goes_on_when_it_has_seen_enough_for_long_enough() -> None:
    wanted = experiment(rollout=Rollout(stages=[50, 100], min_samples=100, min_time_s=60))
    trial = begin(wanted, now=1000.0)
    assert decide(wanted, trial, EVEN, 1061.0) == Advance(1, "100 exposures, no guard is worse")
    assert decide(wanted, trial, EVEN, 1010.0) == Hold("50 s more")
    few = evidence({"feedback": rates(9, 1)}, {"feedback": rates(9, 1)})
    assert decide(wanted, trial, few, 1061.0) == Hold("90 more exposures of b")
    assert isinstance(decide(wanted, trial, BAD, 1061.0), RollBack)
    skewed = evidence({"feedback": rates(900, 100)}, {"feedback": rates(90, 10)})
    assert "mismatch" in getattr(decide(wanted, trial, skewed, 1061.0), "why", "")


def test_a_pause_stops_a_rollout_from_going_on_but_not_from_being_saved() -> None:
    from dataclasses import replace

    wanted = experiment(rollout=Rollout(stages=[50, 100], min_samples=100, min_time_s=0))
    trial = replace(begin(wanted), status="paused")
    assert decide(wanted, trial, EVEN, 10.0) == Hold("paused")
    assert isinstance(decide(wanted, trial, BAD, 10.0), RollBack)


def test_slower_and_dearer_arms_are_seen_too() -> None:
    rng = random.Random(0)
    fast, slow = ([rng.lognormvariate(mu, 0.4) for _ in range(400)] for mu in (0.0, 0.8))
    seen = evidence(
        {"ttft_p95": tally("ttft_p95", fast), "cost": tally("cost", fast)},
        {"ttft_p95": tally("ttft_p95", slow), "cost": tally("cost", slow)},
    )
    wanted = experiment(guards={"ttft_p95": 0.1, "cost": 0.1}, metrics=[])
    found = decide(wanted, begin(wanted), seen, 1.0)
    assert isinstance(found, RollBack)
    assert "ttft_p95" in found.why
    assert "cost" in found.why
    assert {each.verdict for each in ev.compare(plan_of(wanted), seen)} == {"worse"}


def test_values_of_one_user_are_alike_and_count_as_fewer() -> None:
    """A hundred users who always say the same, ten times each: as much as a hundred values, not a thousand."""
    found = Tally()
    for user in range(100):
        seen = (0.0, 0)
        for _ in range(10):
            seen = found.add(MEASURES["feedback"], Score(float(user < 60)), seen) or seen
    assert found.count == 1000
    assert found.design_effect == pytest.approx(10, rel=0.02)
    alone = tally("feedback", [float(n % 10 < 6) for n in range(1000)])
    assert alone.design_effect == 1.0


def test_users_who_differ_do_not_make_a_difference_between_equal_arms() -> None:
    """Clustered A/A worlds, looked at all the time: the design effect keeps the error where it was promised."""
    called = 0
    for world in range(100):
        rng = random.Random(world)
        arms = {"a": Tally(), "b": Tally()}
        wanted = plan_of(experiment(metrics=[], guards={"feedback": 0.0}))
        fell = False
        for _user in range(150):
            arm, taste, seen = rng.choice("ab"), rng.betavariate(0.5, 0.2), (0.0, 0)
            for _ in range(8):
                seen = arms[arm].add(MEASURES["feedback"], Score(float(rng.random() < taste)), seen) or seen
            shown = Evidence(0, {name: Arm(tallies={"feedback": each}) for name, each in arms.items()})
            fell = fell or bool(ev.fallen(wanted, shown))
        called += fell
    assert called <= 8


def sample(
    answer: str = "Paris is the capital.", question: str = "What is the capital of France?", **more: Any
) -> Sample:
    return Sample(request_id="r", question=question, answer=answer, has_text=True, **more)


@pytest.mark.parametrize(
    ("given", "label", "value"),
    [
        (sample(), "", 1.0),
        (sample("   "), "empty", 0.0),
        (sample("I'm sorry, but I can't help with that."), "refusal", 0.0),
        (sample("la la la la " * 20), "loop", 0.0),
        (sample("Столица Франции это Париж"), "language", 0.0),
        (sample("not json", wants_json=True), "json", 0.0),
        (sample('```json\n{"a": 1}\n```', wants_json=True), "", 1.0),
        (sample(status=500), "no answer", None),
        (Sample(request_id="r"), "no text", None),
    ],
)
def test_an_answer_that_is_none_is_seen_at_a_glance(given: Sample, label: str, value: float | None) -> None:
    if given.request_id == "r" and not given.has_text:
        assert valid_score(given).value is None
        return
    assert valid_score(given) == Score(value, label)


def test_an_error_is_ours_or_it_is_none() -> None:
    ours, theirs, gone = (MEASURES["error"].score(sample(status=status, error="x")).value for status in (503, 400, 499))
    assert (ours, theirs, gone) == (1.0, 0.0, 0.0)


def test_what_can_t_be_scored_is_not_scored() -> None:
    hit = sample(cache="hit", ttft_s=0.1, cost_dollars=1.0)
    assert MEASURES["cost"].score(hit).value is None
    assert MEASURES["grounded"].score(sample()).value is None
    assert MEASURES["json"].score(sample()).value is None
    assert feedback_value(Feedback(request_id="r", tenant="t", comment="hm")).value is None
    assert feedback_value(Feedback(request_id="r", tenant="t", correction="Rome")).value == 0.0


def test_groundedness_is_the_share_that_the_retrieved_text_has() -> None:
    found = MEASURES["grounded"].score(sample("The tower measures 330 metres", context="The tower has 330 metres."))
    assert found.value == pytest.approx(3 / 4)


def test_every_measure_of_the_config_has_a_score() -> None:
    from typing import get_args

    from gearshift.platform.config import Measure

    assert {*get_args(Measure), "canary"} == set(MEASURES)


def test_a_release_that_gets_worse_than_it_was_is_noticed_and_an_even_one_is_not() -> None:
    past = {"valid": tally("valid", [1.0] * 950 + [0.0] * 50), "ttft_p95": tally("ttft_p95", [0.1] * 400)}
    worse = {"valid": tally("valid", [1.0] * 400 + [0.0] * 100), "ttft_p95": tally("ttft_p95", [0.1] * 200)}
    assert ev.drifted(past, worse, 0.001) == {"valid": "valid 0.8 in the last 500, 0.95 before"}
    even = {"valid": tally("valid", [1.0] * 470 + [0.0] * 30)}
    assert ev.drifted(past, even, 0.001) == {}
    assert ev.drifted({}, worse, 0.001) == {}


def test_two_tallies_together_are_one_of_all() -> None:
    values = [0.125, 0.25, 0.5, 1.0]  # exact in binary
    both = tally("ttft_p95", values[:2])
    both.take_in(tally("ttft_p95", values[2:]))
    assert both == tally("ttft_p95", values)


def two_arms(rng: Any, users: int, effect: float, known: bool, noise: float = 1.0) -> tuple[Tally, Tally]:
    """Costs of users, of which each has a level of its own that was seen before, with noise."""
    arms = Tally(), Tally()
    measured = MEASURES["cost"]
    for user in range(users):
        arm = arms[int(rng.random() < 0.5)]
        level = rng.gauss(10, 3)
        seen = level + rng.gauss(0, 0.5) - 10 if known and user % 5 else 0.0  # a fifth was not there before
        before: Any = None
        for _ in range(rng.randint(1, 6)):
            value = level + rng.gauss(0, noise) + effect * (arm is arms[1])
            before = arm.add(measured, Score(value), before, seen)
    return arms


def test_what_users_were_like_before_narrows_the_interval_and_moves_nothing() -> None:
    rng = random.Random(3)
    widths: list[float] = []
    gaps = []
    for _ in range(60):
        arms = two_arms(rng, 200, 0.5, True)
        a, b, explained = ev.adjusted(*arms)
        assert 0.4 < explained < 0.95
        gaps.append(b.value - a.value)
        interval = ev.interval_of(MEASURES["cost"], *arms, 0.05)
        plain = ev.interval_of(MEASURES["cost"], without(arms[0]), without(arms[1]), 0.05)
        widths.append((interval.high - interval.low) / (plain.high - plain.low))
    assert sum(gaps) / len(gaps) == pytest.approx(0.5, abs=0.1)
    assert max(widths) < 0.85


def without(tally: Tally) -> Tally:
    return Tally(
        count=tally.count, sum=tally.sum, squares=tally.squares,
        unit_values=tally.unit_values, unit_counts=tally.unit_counts, unit_products=tally.unit_products,
    )  # fmt: skip


def test_the_error_that_is_told_is_the_error_that_is_made() -> None:
    """The variance of the adjusted difference over many worlds, and the mean of what each world says it is."""
    rng = random.Random(4)
    gaps, told = [], []
    for _ in range(300):
        a, b, _ = ev.adjusted(*two_arms(rng, 120, 0.0, True))
        gaps.append(b.value - a.value)
        told.append(a.variance / a.count + b.variance / b.count)
    made = sum(gap**2 for gap in gaps) / len(gaps)
    assert made == pytest.approx(sum(told) / len(told), rel=0.25)


def test_without_a_period_before_nothing_is_adjusted() -> None:
    arms = two_arms(random.Random(5), 100, 0.5, False)
    a, b, explained = ev.adjusted(*arms)
    assert (a.value, b.value, explained) == (arms[0].mean, arms[1].mean, 0.0)
    assert a.variance == pytest.approx(arms[0].variance * arms[0].design_effect)
