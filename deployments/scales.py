"""How many replicas each instance of a model has: what the config says, or what its autoscaler decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gearshift.deployments.autoscale import Autoscaler, Decision, load_of
from gearshift.deployments.plan import instances_of
from gearshift.deployments.registry import Member
from gearshift.platform.config import Config, Model


class Scales:
    """Owns the numbers and the autoscalers; whoever asks for replicas does so by them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """Of the config that serves."""
        self._autoscalers: dict[str, Autoscaler] = {}

    @property
    def automatic(self) -> bool:
        return bool(self._autoscalers)

    def wanted(self, config: Config) -> dict[str, int]:
        """Of each instance, if this config served now. A new version of a model begins with as many as the old one has, and with
        one at least, so that it can answer its warm-up questions."""
        return {key: self._number(key, config.models[name]) for key, name in instances_of(config).items()}

    def _number(self, key: str, model: Model) -> int:
        scaling = model.autoscaling
        if scaling is None:
            return model.replicas
        older = [number for known, number in self.numbers.items() if known.partition("@")[0] == key.partition("@")[0]]
        number = self.numbers[key] if key in self.numbers else max([1, scaling.min_replicas, *older])
        return min(max(number, scaling.min_replicas), scaling.max_replicas)

    def follow(self, config: Config, now: float, numbers: Mapping[str, int]) -> None:
        """This config serves from now on, with so many replicas."""
        self.numbers = dict(numbers)
        scaled = {key: config.models[name].autoscaling for key, name in instances_of(config).items()}
        self._autoscalers = {key: Autoscaler(each, now) for key, each in scaled.items() if each is not None}

    def look(self, now: float, members: Iterable[Member]) -> dict[str, Decision]:
        """Instances that shall have another number of replicas from now on."""
        members, found = list(members), {}
        for key, autoscaler in self._autoscalers.items():
            decision = autoscaler.decide(now, load_of(key, members), self.numbers[key])
            if decision is not None:
                found[key], self.numbers[key] = decision, decision.replicas
        return found
