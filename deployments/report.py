"""What the evaluator says of experiments and releases, as JSON for whoever asks. Pure, but for the gauges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gearshift.eval import evidence as ev
from gearshift.eval.canary import Watched
from gearshift.eval.evidence import Arm, Comparison, Evidence, Tally
from gearshift.eval.rollout import Alert, Decision, plan_of
from gearshift.eval.scores import MEASURES
from gearshift.platform import telemetry
from gearshift.platform.config import Experiment
from gearshift.platform.request import JsonObject
from gearshift.router.arms import Trial, arms_of


def experiment_page(
    experiment: Experiment, trial: Trial, evidence: Evidence, compared: Sequence[Comparison]
) -> JsonObject:
    """Where it is, what was seen of its arms, and what that says."""
    plan = plan_of(experiment)
    mismatch = ev.shares_differ(evidence, trial.weights) if evidence.period == trial.period else None
    return {
        "decided": None,
        "status": trial.status,
        "stage": trial.stage,
        "stages": experiment.rollout.stages if experiment.rollout else [],
        "since": trial.since,
        "period": trial.period,
        "evidence_period": evidence.period,
        "why": trial.why,
        "next": "",
        "baseline": plan.baseline,
        "unit": experiment.unit,
        "alpha": experiment.alpha,
        "guards": dict(experiment.guards),
        "mismatch": mismatch,
        "fallen": [[each.measure, each.arm] for each in ev.fallen(plan, evidence)] if not experiment.aa else [],
        "arms": {
            arm: {
                "weight": trial.weights.get(arm, 0.0),
                "exposures": evidence.arms.get(arm, Arm()).exposures,
                "shadows": evidence.arms.get(arm, Arm()).shadows,
                "units": evidence.arms.get(arm, Arm()).units,
                "unscored": {m: t.unscored for m, t in evidence.arms.get(arm, Arm()).tallies.items() if t.unscored},
            }
            for arm in arms_of(experiment)
        },
        "measures": [_shown(each) for each in compared],
    }


def alerts(
    pages: Mapping[str, JsonObject],
    decisions: Mapping[str, Decision],
    watched: Mapping[str, Watched],
    drift: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """What an operator should look at, a line each."""
    found = [f"experiment {n}: worse: {d.why}" for n, d in decisions.items() if isinstance(d, Alert)]
    found += [f"experiment {n}: sample ratio mismatch" for n, page in pages.items() if page["mismatch"] is not None]
    found += [f"release {name}: {each.worse}" for name, each in watched.items() if each.worse]
    found += [f"release {name}: {each.failed} canaries had no answer" for name, each in watched.items() if each.failed]
    return found + [f"release {name} has drifted: {'; '.join(why.values())}" for name, why in drift.items() if why]


def gauge(name: str, evidence: Evidence, mismatch: float | None) -> None:
    for arm, seen in evidence.arms.items():
        telemetry.EXPERIMENT_EXPOSURES.labels(name, arm).set(seen.exposures)
        for measure, tally in seen.tallies.items():
            if tally.count:
                telemetry.EXPERIMENT_VALUE.labels(name, arm, measure).set(ev.value_of(MEASURES[measure], tally))
    telemetry.EXPERIMENT_MISMATCH.labels(name).set(float(mismatch is not None))


def _shown(comparison: Comparison) -> dict[str, Any]:
    shown = asdict(comparison)
    for key in ("baseline_value", "value"):
        shown[key] = _or_none(shown[key])
    shown["interval"] = [_or_none(comparison.interval.low), _or_none(comparison.interval.high)]
    shown["kind"] = MEASURES[comparison.measure].kind
    shown["unit"] = MEASURES[comparison.measure].unit
    return shown


def looked(watched: Watched) -> JsonObject:
    asked = len(watched.last)
    return {
        "at": watched.at,
        "rounds": watched.rounds,
        "questions": asked,
        "well": sum(watched.last.values()),
        "failed": watched.failed,
        "worse": watched.worse,
    }


def told(measure: str, tally: Tally) -> JsonObject:
    return {"value": _or_none(ev.value_of(MEASURES[measure], tally)), "count": tally.count, "unscored": tally.unscored}


def _or_none(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def finite(value: float) -> float:
    return max(-1e9, min(1e9, value))
