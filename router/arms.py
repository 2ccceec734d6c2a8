"""Which release serves: the weights of all experiments at one moment, and the choice that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gearshift.platform.config import Config
from gearshift.router.policy import assign


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights of every experiment's arms, numbered: a gateway takes over one with a higher epoch, and no other."""

    epoch: int = 0
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> Snapshot:
        return cls(0, {name: dict(experiment.arms) for name, experiment in config.experiments.items()})


@dataclass(frozen=True, slots=True)
class Served:
    """The release that serves a tier for one unit; `experiment` is empty when there is none."""

    tier: str
    release: str
    experiment: str = ""


def serve(config: Config, snapshot: Snapshot, tier: str, unit: str) -> Served:
    """Pure: the same arguments always give the same release."""
    asked = config.tiers[tier]
    if asked.release is not None:
        return Served(tier, asked.release)
    name = asked.experiment or ""
    salt = config.experiments[name].salt or name
    return Served(tier, assign(salt, unit, snapshot.weights[name]), name)


def tier_of_release(config: Config, release: str) -> str:
    """The tier whose price a release has when it is asked for by name; empty when it serves none."""
    return next((tier for tier in config.tiers if release in config.releases_of(tier)), "")
