"""How many replicas: decided from facts and a clock, so minutes of load pass in no time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.deployments.autoscale import Autoscaler, Load, load_of
from gearshift.deployments.registry import Member, Ttft
from gearshift.deployments.scales import Scales
from gearshift.platform import config_file
from gearshift.platform.config import Autoscaling
from gearshift.platform.errors import ConfigError
from gearshift.platform.request import EngineStats

SETTINGS = Autoscaling(
    min_replicas=1, max_replicas=6, target_queued_tokens=1000, upscale_delay_s=3, downscale_delay_s=60, ttft_slo_s=2.0
)


class Minutes:
    """A model under an autoscaler, looked at every half second."""

    def __init__(self, settings: Autoscaling, replicas: int = 1) -> None:
        self.now, self.replicas, self.steps = 1000.0, replicas, 0
        self.moves: list[tuple[float, int, str]] = []
        self._autoscaler = Autoscaler(settings, self.now)

    def pass_(self, seconds: float, starts: bool = True, **load: Any) -> None:
        begun = self.now
        for tick in range(1, int(seconds * 2) + 1):
            self.now = begun + tick / 2
            there = Load(self.replicas if starts else 0, **load)
            decision = self._autoscaler.decide(self.now, there, self.replicas)
            if decision is not None:
                assert decision.replicas != self.replicas
                self.replicas = decision.replicas
                self.moves.append((self.now - begun, decision.replicas, decision.why))


def test_a_queue_brings_as_many_replicas_as_can_take_it_and_a_blip_none() -> None:
    model = Minutes(SETTINGS)
    model.pass_(2, queued_tokens=9000, requests=9)
    model.pass_(5, queued_tokens=100, requests=1)
    assert model.moves == []
    model.pass_(10, queued_tokens=3500, requests=9)
    assert [(at, number) for at, number, _ in model.moves] == [(3.5, 4)]
    assert model.moves[0][2] == "3500 tokens are queued"


def test_replicas_are_let_go_when_a_whole_delay_did_not_need_them() -> None:
    model = Minutes(SETTINGS, replicas=4)
    for _ in range(5):  # one short peak a minute keeps them all
        model.pass_(50, queued_tokens=100, requests=1)
        model.pass_(5, queued_tokens=4000, requests=9)
    assert model.moves == []
    model.pass_(120, queued_tokens=1500, requests=1)
    assert [number for _, number, _ in model.moves] == [2]


def test_a_load_at_the_edge_of_two_numbers_does_not_move_to_and_fro() -> None:
    model = Minutes(SETTINGS)
    for _ in range(20):
        model.pass_(100, queued_tokens=2080, requests=4)
        model.pass_(100, queued_tokens=1950, requests=4)
    assert [number for _, number, _ in model.moves] == [3]


def test_full_kv_caches_count_as_well_as_queues() -> None:
    model = Minutes(SETTINGS, replicas=2)
    model.pass_(5, kv_usage=2.0, requests=40)
    assert [(number, why) for _, number, why in model.moves] == [(3, "2.0 KV caches are full")]


def test_late_answers_bring_more_once_those_that_are_there_gave_them() -> None:
    model = Minutes(SETTINGS, replicas=2)
    model.pass_(60, ttft_p95=3.0, requests=2)
    assert model.moves == []  # a minute's answers may still be of another number
    model.pass_(5, ttft_p95=3.0, requests=2)
    assert [(number, why) for _, number, why in model.moves] == [(3, "answers begin after 3.00 s (p95)")]
    model.pass_(30, ttft_p95=3.0, requests=2)
    assert model.replicas == 3  # it was just moved
    model.pass_(200, ttft_p95=1.6, requests=1)
    assert model.replicas == 3  # kept, but not by much
    model.pass_(200, ttft_p95=0.2, requests=1)
    assert model.replicas == 1


def test_a_model_that_nobody_asks_sleeps_and_is_woken_by_the_first() -> None:
    model = Minutes(replace_(SETTINGS, min_replicas=0, downscale_to_zero_delay_s=30.0))
    for step in range(10):  # answers between two looks are seen by their steps
        model.pass_(20, steps=step)
    assert model.replicas == 1
    model.pass_(31, steps=9)
    assert [number for _, number, _ in model.moves] == [0]
    model.pass_(1000)
    assert model.replicas == 0
    model.pass_(0.5, held=40)
    assert model.moves[1][1:] == (1, "requests wait for it: 40")
    model.pass_(300, held=40, starts=False)  # however long it takes to start
    assert model.replicas == 1


def replace_(settings: Autoscaling, **changes: Any) -> Autoscaling:
    return Autoscaling(**settings.model_dump() | changes)


@given(
    st.lists(st.tuples(st.integers(0, 20000), st.floats(0, 8), st.floats(0, 30), st.integers(0, 9)), max_size=200),
    st.integers(0, 3),
    st.integers(3, 8),
)
def test_the_bounds_hold_whatever_comes(facts: list[tuple[int, float, float, int]], least: int, most: int) -> None:
    settings = replace_(SETTINGS, min_replicas=least, max_replicas=most, downscale_delay_s=2.0)
    model = Minutes(settings, replicas=5)
    for queued, kv, ttft, held in facts:
        model.pass_(1, queued_tokens=queued, kv_usage=kv, ttft_p95=ttft, held=held)
        assert least <= model.replicas <= most


def test_new_bounds_hold_at_once() -> None:
    model = Minutes(replace_(SETTINGS, max_replicas=2), replicas=5)
    model.pass_(0.5, queued_tokens=90_000)
    assert model.replicas == 2


def test_the_load_is_what_replicas_and_gateways_say() -> None:
    busy = EngineStats(running=3, waiting=2, kv_blocks_used=30, kv_blocks_total=40, queued_tokens=700, steps=5)
    members = [
        Member(name="a", model="m@1", stats=busy, ttft=Ttft(0.1, 0.5, 0.9, 10)),
        Member(name="b", model="m@1", stats=replace(busy, queued_tokens=100), ttft=Ttft(0.1, 0.7, 0.9, 10)),
        Member(name="c", model="other@1", stats=busy),
        Member(name="g", held={"m@1": 3}),
    ]
    assert load_of("m@1", members) == Load(2, 800, 1.5, 0.7, 10, 3, 10)


CONFIG = """
models: {m: {echo: {delay_s: %s}, %s}}
prompts: {none: {}}
policies: {none: {}}
releases: {a: {model: m, prompt: none, policy: none}}
tiers: {cheap: {release: a}}
tenants: {dev: {open: true}}
"""


def test_a_new_version_begins_with_as_many_as_the_old_one_had() -> None:
    old = config_file.parse(CONFIG % (0, "autoscaling: {min_replicas: 0, max_replicas: 4}"))
    scales = Scales()
    [(key, number)] = scales.wanted(old).items()
    assert number == 1  # one that may sleep is tried first
    scales.follow(old, 0.0, {key: 3})
    assert scales.wanted(config_file.parse(CONFIG % (1, "autoscaling: {max_replicas: 2}"))).popitem()[1] == 2
    assert scales.wanted(config_file.parse(CONFIG % (0, "autoscaling: {max_replicas: 8}"))) == {key: 3}
    assert scales.wanted(config_file.parse(CONFIG % (0, "replicas: 2"))) == {key: 2}
    scales.follow(old, 0.0, {key: 0})
    assert scales.wanted(old) == {key: 0}  # another revision does not wake it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("replicas: 2, autoscaling: {max_replicas: 4}", "not together with autoscaling"),
        ("autoscaling: {min_replicas: 5, max_replicas: 4}", "at least min_replicas, which is 5"),
        ("autoscaling: {max_replicas: 4, target: 1}", "target"),
        ("autoscaling: {}", "max_replicas"),
    ],
)
def test_what_can_not_be_is_told(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_file.parse(CONFIG % (0, words))
