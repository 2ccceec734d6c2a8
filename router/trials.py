"""What is done to an experiment: from one snapshot to the next. Pure; whether to do it is decided in eval/rollout.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gearshift.platform.config import Experiment, Rollout
from gearshift.router.arms import Snapshot, Trial, arms_of, release_of, stage_weights, with_weights


@dataclass(frozen=True, slots=True)
class Advance:
    """On to the next stage."""

    stage: int
    why: str


@dataclass(frozen=True, slots=True)
class RollBack:
    """These arms serve nobody any more."""

    arms: tuple[str, ...]
    why: str


def stage_name(rollout: Rollout, stage: int) -> str:
    share = rollout.stages[stage]
    return "stage shadow" if share == "shadow" else f"stage {share:g} %"


def carried_out(
    experiment: Experiment, name: str, snapshot: Snapshot, step: Advance | RollBack, now: float
) -> Snapshot:
    """The next snapshot."""
    if isinstance(step, Advance):
        trial = snapshot.trials[name]
        return _replaced(snapshot, name, _at_stage(experiment, trial, step, snapshot.epoch + 1, now))
    return rolled_back(experiment, name, snapshot, step, now)


def _at_stage(experiment: Experiment, trial: Trial, step: Advance, epoch: int, now: float) -> Trial:
    assert experiment.rollout is not None
    moved = with_weights(trial, stage_weights(experiment, step.stage), epoch, now, step.why)
    done = experiment.rollout.shares[step.stage] >= 100
    return replace(moved, stage=step.stage, status="completed" if done else "running")


def rolled_back(experiment: Experiment, name: str, snapshot: Snapshot, step: RollBack, now: float) -> Snapshot:
    """What the fallen arms had goes to the baseline, and nothing else moves; their cached answers are left behind."""
    trial = snapshot.trials[name]
    baseline = arms_of(experiment)[0]
    weights = {arm: share for arm, share in trial.weights.items() if arm not in step.arms}
    weights[baseline] = weights.get(baseline, 0.0) + sum(trial.weights.get(arm, 0.0) for arm in step.arms)
    moved = with_weights(trial, weights, snapshot.epoch + 1, now, step.why)
    alone = math.isclose(weights[baseline], 1.0)
    moved = replace(moved, status="rolled back" if alone else trial.status, stage=-1 if alone else trial.stage)
    generations = dict(snapshot.generations)
    for release in {release_of(arm) for arm in step.arms} if experiment.thresholds is None else ():
        generations[release] = generations.get(release, 0) + 1
    fallen = {trial.contents[arm]: step.why for arm in step.arms if arm in trial.contents}
    new = _replaced(snapshot, name, moved)
    return replace(new, generations=generations, fallen={**snapshot.fallen, **fallen})


def set_by_hand(name: str, snapshot: Snapshot, weights: Mapping[str, float], now: float, why: str) -> Snapshot:
    """A person's weights; a rollout is over with them, and an arm that fell serves again."""
    trial = snapshot.trials[name]
    moved = with_weights(trial, weights, snapshot.epoch + 1, now, why)
    forgiven = {trial.contents[arm] for arm, weight in weights.items() if weight and arm in trial.contents}
    fallen = {content: reason for content, reason in snapshot.fallen.items() if content not in forgiven}
    return replace(_replaced(snapshot, name, replace(moved, stage=-1, status="running")), fallen=fallen)


def paused(name: str, snapshot: Snapshot, pause: bool, why: str) -> Snapshot:
    """The period goes on: what was seen still counts."""
    return _replaced(snapshot, name, replace(snapshot.trials[name], status="paused" if pause else "running", why=why))


def _replaced(snapshot: Snapshot, name: str, trial: Trial) -> Snapshot:
    return replace(snapshot, epoch=snapshot.epoch + 1, trials={**snapshot.trials, name: trial})
