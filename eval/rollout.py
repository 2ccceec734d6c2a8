"""What happens to an experiment next, from its state and the evidence: pure functions, so that each decision can be shown,
tested, and taken again by whoever finds it undone."""

from __future__ import annotations

from dataclasses import dataclass

from gearshift.eval.evidence import Arm, Evidence, Plan, fallen, shares_differ
from gearshift.platform.config import Experiment
from gearshift.router.arms import Trial, arms_of
from gearshift.router.trials import Advance, RollBack


@dataclass(frozen=True, slots=True)
class Hold:
    """Nothing to do, and why not more."""

    why: str


@dataclass(frozen=True, slots=True)
class Alert:
    """As bad as a roll back, but the config leaves it to a person."""

    arms: tuple[str, ...]
    why: str


Decision = Hold | Advance | RollBack | Alert


def plan_of(experiment: Experiment) -> Plan:
    looks = len(experiment.rollout.stages) if experiment.rollout else 1
    return Plan(
        baseline=arms_of(experiment)[0],
        measures=tuple(dict.fromkeys([*experiment.guards, *experiment.metrics])),
        guards={str(name): margin for name, margin in experiment.guards.items()},
        alpha=experiment.alpha,
        min_samples=experiment.min_samples,
        looks=looks,
    )


def decide(experiment: Experiment, trial: Trial, evidence: Evidence, now: float) -> Decision:
    """`evidence` of another period than the trial's counts for nothing. A guard that is surely worse comes first, also while
    a person has paused the rollout: a pause stops it from going on, not from being saved."""
    if trial.status in ("rolled back", "completed"):
        return Hold(trial.status)
    if evidence.period != trial.period:
        evidence = Evidence(trial.period)
    if now - trial.since < experiment.min_time_s:
        return Hold(f"{experiment.min_time_s - (now - trial.since):.0f} s are left of min_time_s")
    if not experiment.aa:
        found = [
            each for each in fallen(plan_of(experiment), evidence) if trial.weights.get(each.arm) or experiment.shadow
        ]
        if found:
            arms = tuple(dict.fromkeys(each.arm for each in found))
            why = "; ".join(f"{each.arm}: {each}" for each in found)
            return RollBack(arms, why) if experiment.on_worse == "roll_back" else Alert(arms, why)
    return _onwards(experiment, trial, evidence, now)


def _onwards(experiment: Experiment, trial: Trial, evidence: Evidence, now: float) -> Decision:
    rollout = experiment.rollout
    if rollout is None:
        return Hold("no rollout")
    if trial.status == "paused":
        return Hold("paused")
    if trial.stage + 1 >= len(rollout.stages):
        return Hold("last stage")
    candidate = arms_of(experiment)[1]
    arm = evidence.arms.get(candidate, Arm())
    hidden = rollout.stages[trial.stage] == "shadow"
    seen, kind = (arm.shadows, "answers in the shadow") if hidden else (arm.exposures, "exposures")
    if seen < rollout.min_samples:
        return Hold(f"{rollout.min_samples - seen} more {kind} of {candidate}")
    if now - trial.since < rollout.min_time_s:
        return Hold(f"{rollout.min_time_s - (now - trial.since):.0f} s more")
    if shares_differ(evidence, trial.weights) is not None:
        return Hold("units did not come by their shares (sample ratio mismatch)")
    return Advance(trial.stage + 1, f"{seen} {kind}, no guard is worse")
