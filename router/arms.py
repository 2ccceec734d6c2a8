"""Which release serves: the state of all experiments at one moment, and the choice that follows from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from gearshift.platform.config import Config, Experiment
from gearshift.platform.samples import Exposure

PARTS = 1_000_000
"""The parts that units are spread over."""
AGAIN = " (again)"
"""Name of the second arm of an A/A test, after the release's."""
Status = Literal["running", "paused", "rolled back", "completed"]


@dataclass(frozen=True, slots=True)
class Segment:
    """The parts before `end`, from the end of the segment before it."""

    end: int
    arm: str


@dataclass(frozen=True, slots=True)
class Trial:
    """An experiment as it runs."""

    segments: tuple[Segment, ...]
    period: int = 0
    """Epoch in which the weights were last changed; what was seen before does not count for what is decided now."""
    since: float = 0.0
    """When that was, in seconds since 1970."""
    stage: int = -1
    """Of its rollout; -1 where there is none."""
    status: Status = "running"
    why: str = ""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Digest of what each arm pins. When that changes it is another experiment under the same name."""

    @property
    def weights(self) -> dict[str, float]:
        """Shares of the units, in 0 to 1, of the arms that have one."""
        found: dict[str, float] = {}
        start = 0
        for segment in self.segments:
            found[segment.arm] = found.get(segment.arm, 0) + segment.end - start
            start = segment.end
        return {arm: parts / PARTS for arm, parts in found.items()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What serves, numbered: a gateway takes over one with a higher epoch, and no other."""

    epoch: int = 0
    trials: Mapping[str, Trial] = field(default_factory=dict)
    generations: Mapping[str, int] = field(default_factory=dict)
    """Of a release's cached answers; a new one leaves all older answers behind. 0 where there is none."""
    fallen: Mapping[str, str] = field(default_factory=dict)
    """Why what was rolled back, by the digest of its content: no later config serves it again, only a person."""

    @classmethod
    def of(cls, config: Config) -> Snapshot:
        return cls(
            0, {name: begin(each, contents=contents_of(config, name)) for name, each in config.experiments.items()}
        )

    def weights(self, experiment: Experiment, name: str) -> dict[str, float]:
        """Of all arms, those without a share too."""
        found = self.trials[name].weights
        return {arm: found.get(arm, 0.0) for arm in arms_of(experiment)}


@dataclass(frozen=True, slots=True)
class Served:
    """The release that serves a tier for one unit. exposure: the arm that chose it, where one did."""

    tier: str
    release: str
    exposure: Exposure | None = None


@dataclass(frozen=True, slots=True)
class Units:
    """Who asks, by each of the ways to count."""

    request: str
    user: str = ""
    session: str = ""

    def of(self, kind: str) -> str:
        """Somebody who is not named is taken for somebody new."""
        return {"user": self.user, "session": self.session or self.user}.get(kind, "") or self.request


def arms_of(experiment: Experiment) -> list[str]:
    """The first is what the others are compared with."""
    names = list(experiment.arms)
    if experiment.aa:
        return [names[0], names[0] + AGAIN]
    baseline = experiment.baseline or names[0]
    return [baseline, *(name for name in names if name != baseline)]


def release_of(arm: str) -> str:
    return arm.removesuffix(AGAIN)


def contents_of(config: Config, name: str) -> dict[str, str]:
    """Digest of what each arm of an experiment would answer with: model, prompt, policy, sampling; or its threshold, and what
    is held against it."""
    experiment = config.experiments[name]
    if experiment.thresholds is None:
        return {arm: content_of(config, release_of(arm)) for arm in arms_of(experiment)}
    router = config.router.model_dump(mode="json", exclude={"threshold", "calibration", "pressure"})
    thresholds = experiment.thresholds
    return {arm: _digest([router, thresholds[release_of(arm)]]) for arm in arms_of(experiment)}


def content_of(config: Config, release: str) -> str:
    pinned = config.releases[release]
    parts = [
        pinned.sampling.model_dump(mode="json"),
        config.models[pinned.model].model_dump(mode="json", exclude={"replicas", "warm_up"}),
        config.prompts[pinned.prompt].model_dump(mode="json"),
        config.policies[pinned.policy].model_dump(mode="json"),
    ]
    return _digest(parts)


def _digest(parts: object) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def begin(
    experiment: Experiment,
    now: float = 0.0,
    contents: Mapping[str, str] = MappingProxyType({}),
    fallen: Mapping[str, str] = MappingProxyType({}),
) -> Trial:
    """At its first stage, or with the weights of its config; what fell before gets nothing."""
    arms = arms_of(experiment)
    bad = {arm: fallen[contents[arm]] for arm in arms[1:] if contents.get(arm) in fallen and not experiment.aa}
    if experiment.rollout is not None and not bad:
        return Trial(allocate((), stage_weights(experiment, 0)), since=now, stage=0, contents=dict(contents))
    weights = dict.fromkeys(arms, 1.0) if experiment.aa or experiment.rollout else dict(experiment.arms)
    left = {arm: weights[arm] for arm in arms if arm not in bad}
    lost = sum(weights[arm] for arm in bad)
    left[arms[0]] += lost
    why = "; ".join(f"{arm} fell before: {reason}" for arm, reason in bad.items())
    status: Status = "rolled back" if bad and len(left) == 1 else "running"
    return Trial(allocate((), left), since=now, status=status, why=why, contents=dict(contents))


def stage_weights(experiment: Experiment, stage: int) -> dict[str, float]:
    """The candidate has the stage's share, in %, and the baseline the rest."""
    assert experiment.rollout is not None
    baseline, candidate = arms_of(experiment)
    share = experiment.rollout.shares[stage]
    return {baseline: 100.0 - share, candidate: share}


def allocate(old: Sequence[Segment], weights: Mapping[str, float]) -> tuple[Segment, ...]:
    """The parts of each arm by its weight. Only as many parts change hands as must: an arm that shrinks gives away its last
    ones, and everything else stays where it was."""
    wanted = _whole_parts(weights)
    kept: list[tuple[int, int, str]] = []
    free: list[tuple[int, int]] = []
    left = dict(wanted)
    start = 0
    for segment in old or (Segment(PARTS, ""),):
        stays = min(segment.end - start, left.get(segment.arm, 0))
        if stays:
            kept.append((start, start + stays, segment.arm))
            left[segment.arm] -= stays
        if start + stays < segment.end:
            free.append((start + stays, segment.end))
        start = segment.end
    for arm, missing in left.items():
        while missing:
            begins, ends = free.pop(0)
            taken = min(missing, ends - begins)
            kept.append((begins, begins + taken, arm))
            missing -= taken
            if begins + taken < ends:
                free.insert(0, (begins + taken, ends))
    return _merged(sorted(kept))


def _merged(pieces: Sequence[tuple[int, int, str]]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for _, end, arm in pieces:
        if found and found[-1].arm == arm:
            found.pop()
        found.append(Segment(end, arm))
    return tuple(found)


def _whole_parts(weights: Mapping[str, float]) -> dict[str, int]:
    """By largest remainder: whole numbers that add up."""
    total = sum(weights.values())
    exact = {arm: weight / total * PARTS for arm, weight in weights.items()}
    parts = {arm: int(value) for arm, value in exact.items()}
    most_lost = sorted(exact, key=lambda arm: parts[arm] - exact[arm])
    for arm in most_lost[: PARTS - sum(parts.values())]:
        parts[arm] += 1
    return parts


def part_of(salt: str, unit: str) -> int:
    """A unit's place: its salted hash (Kohavi et al. 2020, "Trustworthy Online Controlled Experiments", chapter 4)."""
    digest = hashlib.blake2b(f"{salt}\0{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) * PARTS >> 64


def assign(salt: str, unit: str, segments: Sequence[Segment]) -> str:
    """The arm of a unit. Pure: it changes only when its part changes hands."""
    part = part_of(salt, unit)
    return next(segment.arm for segment in segments if part < segment.end)


def takes_part(config: Config, name: str, unit: str) -> bool:
    """Not held out, and in the experiment's own slice of its layer: experiments of one layer share no unit."""
    if config.evaluation.holdout and part_of("holdout", unit) < config.evaluation.holdout * PARTS:
        return False
    layer = config.experiments[name].layer
    if layer is None:
        return True
    members = [each for each, experiment in config.experiments.items() if experiment.layer == layer]
    shares = {each: config.experiments[each].layer_share or 1 / len(members) for each in members}
    part, start = part_of(f"layer\0{layer}", unit), 0.0
    for each in members:
        if each == name:
            return start * PARTS <= part < (start + shares[each]) * PARTS
        start += shares[each]
    return False


def serve(config: Config, snapshot: Snapshot, tier: str, units: Units) -> Served:
    """Pure: the same arguments always give the same release."""
    asked = config.tiers[tier]
    if asked.release is not None:
        return Served(tier, asked.release)
    name = asked.experiment or ""
    exposure = choose_arm(config, snapshot, name, units)
    if exposure is None:
        return Served(tier, release_of(arms_of(config.experiments[name])[0]))
    return Served(tier, release_of(exposure.arm), exposure)


def threshold(config: Config, snapshot: Snapshot, units: Units) -> tuple[float | None, Exposure | None]:
    """Of the router, where an experiment chooses it; who takes no part has the baseline's. (None, None) without one."""
    name = config.router.experiment
    if name is None:
        return None, None
    experiment = config.experiments[name]
    exposure = choose_arm(config, snapshot, name, units)
    arm = arms_of(experiment)[0] if exposure is None else exposure.arm
    assert experiment.thresholds is not None
    return experiment.thresholds[release_of(arm)], exposure


def choose_arm(config: Config, snapshot: Snapshot, name: str, units: Units) -> Exposure | None:
    """None for a unit that takes no part."""
    experiment = config.experiments[name]
    unit = units.of(experiment.unit)
    if not takes_part(config, name, unit):
        return None
    trial = snapshot.trials[name]
    arm = assign(experiment.salt or name, unit, trial.segments)
    digest = hashlib.blake2b(f"{name}\0{unit}".encode(), digest_size=8).hexdigest()
    return Exposure(name, arm, trial.period, digest)


def in_shadow(config: Config, snapshot: Snapshot, name: str, request_id: str) -> list[str]:
    """The arms that a request is also sent to, though they have no traffic: none of those that fell."""
    experiment, trial = config.experiments[name], snapshot.trials[name]
    if not experiment.shadow or trial.status in ("rolled back", "completed"):
        return []
    if part_of(f"shadow\0{name}", request_id) >= experiment.shadow * PARTS:
        return []
    weights = trial.weights
    return [
        arm
        for arm in arms_of(experiment)[1:]
        if not weights.get(arm) and trial.contents.get(arm, "") not in snapshot.fallen
    ]


def with_weights(trial: Trial, weights: Mapping[str, float], epoch: int, now: float, why: str) -> Trial:
    """Moves the weights, which begins a new period."""
    return replace(trial, segments=allocate(trial.segments, weights), period=epoch, since=now, why=why)


def tier_of_release(config: Config, release: str) -> str:
    """The tier whose price a release has when it is asked for by name; empty when it serves none."""
    return next((tier for tier in config.tiers if release in config.releases_of(tier)), "")
