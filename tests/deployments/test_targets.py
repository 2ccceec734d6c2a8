"""Where replicas may be placed: from the words of the config to what Ray is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gearshift.deployments.plan import instances_of
from gearshift.deployments.ranks import ACCELERATOR_SHARE, CPU_SHARE, bundles
from gearshift.deployments.replicas import Place
from gearshift.deployments.targets import Targets
from gearshift.platform import config_file
from gearshift.platform.errors import ConfigError

CONFIG = """
models: {m: {%s}}
prompts: {none: {}}
policies: {none: {}}
releases: {a: {model: m, prompt: none, policy: none}}
tiers: {cheap: {release: a}}
tenants: {dev: {open: true}}
gateway: {replicas: 3, max_replicas_per_node: 1}
"""
PLACE = Place(Path("/tmp/gs"), "redis://127.0.0.1", "mine", 1.0, 30.0)


def engine(words: str, replicas: int = 2) -> Any:
    config = config_file.parse(CONFIG % words)
    [key] = instances_of(config)
    [target] = Targets("mine-", PLACE).engines(config, {key: replicas}).values()
    assert target.name == f"mine-model-{key}"
    return target.target._bound_deployment


def test_a_replica_goes_where_the_config_says() -> None:
    asked = engine("echo: {}, num_gpus: 0.5, accelerator_type: H100, resources: {engine: 1}, max_replicas_per_node: 2")
    options = asked.ray_actor_options
    assert {name: options[name] for name in ("num_gpus", "accelerator_type", "resources")} == {
        "num_gpus": 0.5,
        "accelerator_type": "H100",
        "resources": {"engine": 1.0},
    }
    assert asked._replica_config.max_replicas_per_node == 2
    assert asked.num_replicas == 2


def test_the_ranks_of_a_replica_are_placed_together() -> None:
    words = (
        "source: x, tensor_parallel: 2, placement: SPREAD, num_gpus: 1, accelerator_type: H100, resources: {engine: 1}"
    )
    share = {"CPU": CPU_SHARE, "GPU": 1.0, "engine": 1.0, "accelerator_type:H100": ACCELERATOR_SHARE}
    assert bundles(config_file.parse(CONFIG % words).models["m"]) == [share, share]
    asked = engine(words, 1)._replica_config
    assert (asked.placement_group_bundles, asked.placement_group_strategy) == ([share, share], "SPREAD")
    with pytest.raises(ConfigError, match="max_replicas_per_node: not together with tensor_parallel"):
        config_file.parse(CONFIG % "source: x, tensor_parallel: 2, max_replicas_per_node: 1")


def test_one_that_sleeps_is_not_asked_for_and_versions_of_no_other_number_are_the_same() -> None:
    config = config_file.parse(CONFIG % "echo: {}, autoscaling: {min_replicas: 0, max_replicas: 3}")
    [key] = instances_of(config)
    targets = Targets("mine-", PLACE)
    assert targets.engines(config, {key: 0}) == {}
    one, two = (targets.engines(config, {key: n})[key].target._bound_deployment for n in (1, 2))
    assert one.version == two.version == key


def test_gateways_are_spread() -> None:
    config = config_file.parse(CONFIG % "echo: {}")
    gateway, evaluator = Targets("mine-", PLACE).services(config, 1, {})
    assert [gateway.name, evaluator.name] == ["mine-gateway", "mine-evaluator"]
    asked = gateway.target._bound_deployment
    assert (asked.num_replicas, asked._replica_config.max_replicas_per_node) == (3, 1)
