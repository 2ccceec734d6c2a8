from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from gearshift.platform import config_file
from gearshift.platform.errors import ConfigError
from gearshift.router import trials
from gearshift.router.arms import (
    AGAIN,
    PARTS,
    Segment,
    Served,
    Snapshot,
    Units,
    allocate,
    assign,
    begin,
    in_shadow,
    serve,
    takes_part,
    threshold,
)

TEXT = """
models: {m: {echo: {}}}
prompts: {none: {}}
policies: {none: {}}
releases: {a: {model: m, prompt: none, policy: none}, b: {model: m, prompt: none, policy: none}}
tiers: {cheap: {experiment: x}, expensive: {experiment: y}}
tenants: {dev: {open: true}}
experiments:
"""


def config(x: str = "{arms: {a: 1, b: 1}}", y: str = "{arms: {a: 1, b: 1}}", extra: str = "") -> Any:
    return config_file.parse(f"{TEXT}  x: {x}\n  y: {y}\n{extra}")


def arm(served: Served) -> str:
    assert served.exposure is not None
    return served.exposure.arm


def parts(segments: tuple[Segment, ...]) -> Counter[str]:
    found: Counter[str] = Counter()
    start = 0
    for segment in segments:
        assert segment.end > start
        found[segment.arm] += segment.end - start
        start = segment.end
    assert start == PARTS
    return found


weights = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 1000), min_size=1).filter(lambda w: any(w.values()))


@given(weights, weights)
def test_only_as_many_parts_change_hands_as_must(before: dict[str, int], after: dict[str, int]) -> None:
    old = allocate((), before)
    new = allocate(old, after)
    had, has = parts(old), parts(new)
    assert all(abs(has[arm] - PARTS * weight / sum(after.values())) < 1 for arm, weight in after.items())
    edges = sorted({0, *(segment.end for segment in (*old, *new))})

    def arm_at(segments: tuple[Segment, ...], part: int) -> str:
        return next(segment.arm for segment in segments if part < segment.end)

    moved = sum(end - start for start, end in pairwise(edges) if arm_at(old, start) != arm_at(new, start))
    assert moved == sum(max(0, has[arm] - had[arm]) for arm in has)


def test_ten_per_cent_more_move_exactly_these_ten_per_cent() -> None:
    old = allocate((), {"a": 60, "b": 30, "c": 10})
    new = allocate(old, {"a": 50, "b": 30, "c": 20})
    units = [f"user-{n}" for n in range(20_000)]
    before, after = [assign("s", u, old) for u in units], [assign("s", u, new) for u in units]
    changes = Counter((was, now) for was, now in zip(before, after, strict=True) if was != now)
    assert set(changes) == {("a", "c")}
    assert changes["a", "c"] / len(units) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("share", [1, 5, 25, 50, 90])
def test_units_come_by_the_weights(share: int) -> None:
    segments = allocate((), {"a": 100 - share, "b": share})
    counts = Counter(assign(f"salt {share}", f"user-{n}", segments) for n in range(50_000))
    assert chisquare([counts["a"], counts["b"]], [500 * (100 - share), 500 * share]).pvalue > 0.001


def test_experiments_with_other_salts_are_independent() -> None:
    half = allocate((), {"a": 1, "b": 1})
    same = sum(assign("x", f"{n}", half) == assign("y", f"{n}", half) for n in range(10_000))
    assert same / 10_000 == pytest.approx(0.5, abs=0.02)


def test_experiments_of_a_layer_share_no_unit_and_those_left_out_get_the_baseline() -> None:
    loaded = config(
        "{arms: {a: 0, b: 1}, layer: l, layer_share: 0.3}", "{arms: {a: 0, b: 1}, layer: l, layer_share: 0.5}"
    )
    units = [f"user-{n}" for n in range(5_000)]
    within = {name: {u for u in units if takes_part(loaded, name, u)} for name in "xy"}
    assert not within["x"] & within["y"]
    assert [len(within[name]) / 5_000 for name in "xy"] == pytest.approx([0.3, 0.5], abs=0.03)
    out = next(u for u in units if u not in within["x"])
    served = serve(loaded, Snapshot.of(loaded), "cheap", Units("r", user=out))
    assert (served.release, served.exposure) == ("a", None)


def test_the_holdout_takes_part_in_nothing() -> None:
    loaded = config(extra="evaluation: {holdout: 0.1}")
    units = [f"user-{n}" for n in range(5_000)]
    held = {name: {u for u in units if not takes_part(loaded, name, u)} for name in "xy"}
    assert held["x"] == held["y"]
    assert len(held["x"]) / 5_000 == pytest.approx(0.1, abs=0.02)


def test_the_same_user_keeps_the_arm_and_a_nameless_one_is_somebody_new() -> None:
    loaded = config()
    snapshot = Snapshot.of(loaded)
    assert len({arm(serve(loaded, snapshot, "cheap", Units(f"r{n}", user="anna"))) for n in range(50)}) == 1
    assert len({arm(serve(loaded, snapshot, "cheap", Units(f"r{n}"))) for n in range(50)}) == 2


def test_sessions_and_requests_are_units_too() -> None:
    loaded = config("{arms: {a: 1, b: 1}, unit: session}", "{arms: {a: 1, b: 1}, unit: request}")
    units = [Units(f"r{n}", user="anna", session="s") for n in range(50)]
    assert len({arm(serve(loaded, Snapshot.of(loaded), "cheap", unit)) for unit in units}) == 1
    assert len({arm(serve(loaded, Snapshot.of(loaded), "expensive", unit)) for unit in units}) == 2


def test_an_a_a_test_has_two_arms_of_one_release() -> None:
    loaded = config("{arms: {a: 1}, aa: true}")
    served = [serve(loaded, Snapshot.of(loaded), "cheap", Units(f"r{n}")) for n in range(100)]
    assert {arm(each) for each in served} == {"a", "a" + AGAIN}
    assert {each.release for each in served} == {"a"}


def test_a_fallen_arm_s_units_go_to_the_baseline_and_its_answers_are_left_behind() -> None:
    loaded = config("{arms: {a: 40, b: 60}}")
    old = Snapshot(3, {"x": begin(loaded.experiments["x"])})
    new = trials.rolled_back(loaded.experiments["x"], "x", old, trials.RollBack(("b",), "worse"), 5.0)
    assert new.epoch == 4
    assert new.trials["x"].weights == {"a": 1.0}
    assert (new.trials["x"].status, new.trials["x"].why, new.trials["x"].period) == ("rolled back", "worse", 4)
    assert new.generations == {"b": 1}


def test_stages_of_a_rollout_follow_each_other_to_the_end() -> None:
    loaded = config("{arms: {a: 1, b: 0}, rollout: {stages: [5, 50, 100]}}")
    experiment = loaded.experiments["x"]
    snapshot = Snapshot(1, {"x": begin(experiment)})
    assert snapshot.trials["x"].weights == pytest.approx({"a": 0.95, "b": 0.05})
    snapshot = trials.carried_out(experiment, "x", snapshot, trials.Advance(1, "fine"), 1.0)
    assert (snapshot.trials["x"].weights["b"], snapshot.trials["x"].status) == (0.5, "running")
    snapshot = trials.carried_out(experiment, "x", snapshot, trials.Advance(2, "fine"), 2.0)
    assert (snapshot.trials["x"].weights, snapshot.trials["x"].status) == ({"b": 1.0}, "completed")


def test_a_rollout_may_begin_in_the_shadow() -> None:
    loaded = config("{arms: {a: 1, b: 0}, shadow: 0.2, rollout: {stages: [shadow, 10, 100]}}")
    experiment = loaded.experiments["x"]
    snapshot = Snapshot.of(loaded)
    assert (snapshot.trials["x"].weights, snapshot.trials["x"].stage) == ({"a": 1.0}, 0)
    chosen = [n for n in range(5_000) if in_shadow(loaded, snapshot, "x", f"r{n}") == ["b"]]
    assert len(chosen) / 5_000 == pytest.approx(0.2, abs=0.02)
    moved = trials.carried_out(experiment, "x", snapshot, trials.Advance(1, "fine"), 1.0)
    assert moved.trials["x"].weights == pytest.approx({"a": 0.9, "b": 0.1})
    assert not any(in_shadow(loaded, moved, "x", f"r{n}") for n in range(100))


def test_what_fell_is_not_asked_in_the_shadow_any_more() -> None:
    loaded = config("{arms: {a: 1, b: 0}, shadow: 1}")
    snapshot = Snapshot.of(loaded)
    assert in_shadow(loaded, snapshot, "x", "r") == ["b"]
    fell = trials.carried_out(loaded.experiments["x"], "x", snapshot, trials.RollBack(("b",), "worse"), 1.0)
    assert in_shadow(loaded, fell, "x", "r") == []


THRESHOLDS = "{arms: {low: 1, high: 1}, thresholds: {low: 0.2, high: 0.4}}"


def thresholds() -> Any:
    text = TEXT.replace("{experiment: x}", "{release: a}").replace("{experiment: y}", "{release: b}")
    return config_file.parse(f"{text}  x: {THRESHOLDS}\nrouter: {{experiment: x}}\n")


def test_arms_may_be_thresholds_of_the_router() -> None:
    loaded = thresholds()
    found = [threshold(loaded, Snapshot.of(loaded), Units(f"r{n}")) for n in range(2_000)]
    values = Counter(value for value, _ in found)
    assert values[0.2] / 2_000 == pytest.approx(0.5, abs=0.05)
    assert all(seen and value == {"low": 0.2, "high": 0.4}[seen.arm] for value, seen in found)


def test_a_threshold_that_falls_leaves_no_cached_answers_behind_but_stays_fallen() -> None:
    loaded = thresholds()
    snapshot = Snapshot.of(loaded)
    fell = trials.carried_out(loaded.experiments["x"], "x", snapshot, trials.RollBack(("high",), "worse"), 1.0)
    assert fell.generations == {}
    assert {threshold(loaded, fell, Units(f"r{n}"))[0] for n in range(100)} == {0.2}
    assert begin(loaded.experiments["x"], 0.0, snapshot.trials["x"].contents, fell.fallen).status == "rolled back"


@pytest.mark.parametrize(
    ("experiment", "said"),
    [
        ("{arms: {a: 1, b: 1}, baseline: c}", "none of the arms"),
        ("{arms: {a: 1}, rollout: {}}", "exactly two arms"),
        ("{arms: {a: 1, b: 1}, rollout: {stages: [5, 5]}}", "greater than"),
        ("{arms: {a: 1, b: 1}, rollout: {stages: [0, 5]}}", "greater than 0"),
        ("{arms: {a: 1, b: 1}, shadow: 0.1, rollout: {stages: [5, shadow]}}", "shadow comes first"),
        ("{arms: {a: 1, b: 1}, rollout: {stages: [shadow, 5]}}", "needs a share of the requests"),
        ("{arms: {low: 1, high: 1}, thresholds: {low: 0.2}}", "one for each arm"),
        ("{arms: {low: 1, high: 1}, thresholds: {low: 0.2, high: 0.4}}", "belongs to router.experiment"),
        ("{arms: {a: 1, b: 1}, metrics: [preferred]}", "set evaluation.judge"),
        ("{arms: {a: 1, b: 1}, aa: true}", "exactly one arm"),
        ("{arms: {a: 1, b: 1}, layer_share: 0.5}", "needs a layer"),
        ("{arms: {a: 1, b: 1}, metrics: [sucess]}", "experiments.x.metrics"),
        ("{arms: {a: 1, b: 1}, guards: {eror: 0}}", "experiments.x.guards"),
    ],
)
def test_wrong_experiments_are_config_errors(experiment: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(experiment)


def test_shares_of_a_layer_must_fit() -> None:
    with pytest.raises(ConfigError, match="more than 1"):
        config("{arms: {a: 1}, layer: l, layer_share: 0.7}", "{arms: {a: 1}, layer: l, layer_share: 0.5}")
    with pytest.raises(ConfigError, match="or none"):
        config("{arms: {a: 1}, layer: l, layer_share: 0.7}", "{arms: {a: 1}, layer: l}")
