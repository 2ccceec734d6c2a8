"""The evaluator: reads what happened, keeps the evidence, and acts on it. Off the path of every request.

Its state is in Redis, and is written in one step with its place in the stream of samples: whoever ends, starts again or is
there twice takes in each sample once. What it decides follows from the stored evidence alone, so that a decision that a
crash left undone is made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from gearshift.deployments import canaries, report
from gearshift.deployments.canaries import Canaries
from gearshift.deployments.control import Change, SnapshotBoard, SnapshotHolder
from gearshift.deployments.judge import MOST_WAITING, Judge, chosen, pairs_of
from gearshift.deployments.prober import Prober
from gearshift.deployments.samples import BATCH, decode, stream_of
from gearshift.deployments.webhooks import Webhooks
from gearshift.eval import evidence as ev
from gearshift.eval.canary import Watched
from gearshift.eval.evidence import Arm, Comparison, Evidence, Seen, Tally
from gearshift.eval.rollout import Alert, Decision, decide, plan_of
from gearshift.eval.scores import LATER, MEASURES, Score, feedback_value
from gearshift.platform import telemetry
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config
from gearshift.platform.request import JsonObject
from gearshift.platform.samples import Asked, Exposure, Feedback, Judged, Sample
from gearshift.router import trials
from gearshift.router.arms import Snapshot, Trial, arms_of
from gearshift.router.trials import Advance, RollBack, carried_out

log = logging.getLogger(__name__)

WAIT_S = 0.2
"""For the next sample; then the clock alone may decide."""
AWAY_S = 0.5
REPORT_S = 0.5
MOST_UNITS = 1_000_000
"""What is remembered of an experiment's units, a measure and a unit each; units beyond count as new, each time they come."""
POINTS = 400
"""Of the track of an experiment; when there are more, every other one goes."""

WINDOW = 500
"""Requests of a release that are compared with all before them."""
DRIFT_ALPHA = 0.001
"""Chance that a window is called worse when nothing has changed."""

Kind = Literal["exposure", "shadow", "more"]
"""Of what is counted: an arm that served, one in the shadow, or a score that came later."""

COMMIT = """
-- KEYS: state, stream, pairs for the judge; ARGV: position expected, position new, state new, most pairs that wait, number of
-- new pairs, these, then key, field, value of each unit.
-- 0 when somebody else has taken samples in since.
local position = redis.call('HGET', KEYS[1], 'position') or '0-0'
if position ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'position', ARGV[2], 'state', ARGV[3])
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
redis.call('XDEL', KEYS[2], ARGV[2])
local first = 6 + tonumber(ARGV[5])
for i = 6, first - 1 do redis.call('RPUSH', KEYS[3], ARGV[i]) end
redis.call('LTRIM', KEYS[3], -tonumber(ARGV[4]), -1)
for i = first, #ARGV, 3 do redis.call('HSET', ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
return 1
"""


def _copied(evidence: Evidence) -> Evidence:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(evidence), type=Evidence)


class Point(msgspec.Struct, frozen=True, array_like=True):
    """What could be said of one arm's measure at one time."""

    at: float
    count: int
    measure: str
    arm: str
    value: float
    baseline: float
    low: float
    high: float


class Before(msgspec.Struct):
    """The last period of an experiment in which the baseline served everybody. means: of each measure."""

    period: int
    means: dict[str, float] = {}


class State(msgspec.Struct):
    """All that the evaluator knows, but for the units."""

    evidence: dict[str, Evidence] = {}
    releases: dict[str, dict[str, Tally]] = {}
    tracks: dict[str, list[Point]] = {}
    decided: dict[str, bytes] = {}
    """Of each experiment that was rolled back: what was known then, as JSON."""
    alerted: dict[str, int] = {}
    """The period in which each experiment was last noted in the log as worse, or as mismatched."""
    past: dict[str, dict[str, Tally]] = {}
    """Of each release, all windows but the present one, which is in `recent`."""
    recent: dict[str, dict[str, Tally]] = {}
    drift: dict[str, dict[str, str]] = {}
    """What was worse in the last whole window than before, by release and measure."""
    judged: dict[str, int] = {}
    """Pairs of answers by what the judge said."""
    before: dict[str, Before] = {}
    """What the users of each experiment were like before it began."""
    taken: int = 0


class Evaluator:
    """Owns the evidence. One a deployment; a second one takes over where the first one ended."""

    def __init__(
        self,
        config: Config,
        store: Store,
        reading: Store,
        emitter: telemetry.Emitter,
        prober: Prober | None = None,
    ) -> None:
        """`reading`: a store of its own for waiting on samples. `prober`: needed for a judge and for canaries."""
        self._config = config
        self._store = store
        self._reading = reading
        self._emitter = emitter
        self._board = SnapshotBoard(store, config)
        self.holder = SnapshotHolder(Snapshot.of(config))
        self._key = store.key("evaluator")
        self._prober = prober
        self._pairs: list[bytes] = []
        """For the judge, since the last commit."""
        self.state = State()
        self._position = "0-0"
        self._units: dict[str, dict[str, Seen]] = {}
        self._before: dict[str, dict[str, Seen]] = {}
        """Of the period in `State.before`."""
        self._changed: dict[tuple[str, str], Seen] = {}
        self._outdated: list[str] = []
        self._reporting: asyncio.Task[None] | None = None
        self._next_report = 0.0
        self._told: tuple[int, int, int] | None = None
        self._drifted: list[tuple[str, str]] = []
        """Releases and what was worse, to be noted in the log."""
        self._deciding: dict[str, tuple[Trial, Evidence]] = {}
        """As it was when an arm has just been rolled back, to be shown."""
        self.decisions: dict[str, Decision] = {}

    async def run(self) -> None:
        """Until cancelled."""
        work = [self._board.follow(self.holder), Webhooks(self._config, self._store, os.environ).run()]
        if self._prober is not None and self._config.evaluation.judge is not None:
            work.append(Judge(self._config, self._store, self._prober).run())
        if self._prober is not None and self._config.evaluation.canaries is not None:
            work.append(Canaries(self._config, self._store, self._prober).run())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            while True:
                try:
                    self.holder.take(await self._board.open())
                    await self.load()
                    while True:
                        await self.step(WAIT_S)
                        for task in tasks:
                            if task.done():
                                task.result()  # raises what ended it: then all of this is to be started again
                except StoreAway:
                    await asyncio.sleep(AWAY_S)
        finally:
            for task in tasks:
                task.cancel()
            await self.close()

    async def close(self) -> None:
        """Nothing of it runs afterwards."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
            self._reporting = None

    async def load(self) -> None:
        """Where the last one ended. Raises `StoreAway`."""
        found = await self._store.hash_all(self._key)
        self._position = found["position"].decode() if "position" in found else "0-0"
        self.state = msgspec.msgpack.decode(found["state"], type=State) if "state" in found else State()
        self._units, self._before, self._changed, self._pairs = {}, {}, {}, []
        for name, evidence in self.state.evidence.items():
            self._units[name] = await self._read_units(name, evidence.period)
        for name, before in self.state.before.items():
            self._before[name] = await self._read_units(name, before.period)

    async def _read_units(self, name: str, period: int) -> dict[str, Seen]:
        units = await self._store.hash_all(self._units_key(name, period))
        return {field: msgspec.msgpack.decode(value, type=Seen) for field, value in units.items()}

    async def step(self, wait_s: float) -> int:
        """Takes in what has come, decides, reports. Returns the number of entries. Raises `StoreAway`."""
        entries = await self._reading.stream_after(stream_of(self._store), self._position, BATCH, wait_s)
        for _, fields in entries:
            try:
                self._take(decode(fields))
            except (msgspec.DecodeError, KeyError):
                log.warning("a sample of another version was skipped")
        if entries and not await self._commit(entries[-1][0]):
            log.warning("another evaluator was here; going on from where it is")
            await self.load()
            return 0
        await self._decide()
        self._report_when_due()
        return len(entries)

    def _take(self, entry: Sample | Judged | tuple[Asked, Feedback]) -> None:
        self.state.taken += 1
        if isinstance(entry, Sample):
            scores = {name: measured.score(entry) for name, measured in MEASURES.items() if name not in LATER}
            self._count(entry.release, entry.exposures, scores, "shadow" if entry.shadow else "exposure")
            for exposure in entry.exposures:
                evidence = self.state.evidence.get(exposure.experiment)
                if evidence is not None:
                    evidence.first_at, evidence.last_at = evidence.first_at or entry.at, entry.at
            judging = self._config.evaluation.judge
            if judging is not None and entry.shadow and entry.status == 200:
                self._pairs += chosen(entry, judging.share)
            telemetry.SCORED.labels(entry.release).inc()
            self._emitter.evaluated(entry.request_id, entry.trace, {n: (s.value, s.label) for n, s in scores.items()})
            return
        if isinstance(entry, Judged):
            request_id, trace, score = entry.request_id, entry.trace, Score(entry.value, entry.label)
            release, exposures, measure = entry.release, entry.exposures, entry.measure
        else:
            asked, feedback = entry
            request_id, trace, score = feedback.request_id, "", feedback_value(feedback)
            release, exposures, measure = asked.release, asked.exposures, "feedback"
        if measure == "preferred":
            self.state.judged[score.label] = self.state.judged.get(score.label, 0) + 1
        self._count(release, exposures, {measure: score}, "more")
        self._emitter.evaluated(request_id, trace, {measure: (score.value, score.label)})

    def _count(self, release: str, exposures: Sequence[Exposure], scores: Mapping[str, Score], kind: Kind) -> None:
        for tallies in (self.state.releases.setdefault(release, {}), self.state.recent.setdefault(release, {})):
            for name, score in scores.items():
                tallies.setdefault(name, Tally()).add(MEASURES[name], score, None)
        self._look_for_drift(release)
        for exposure in exposures:
            if exposure.experiment in self._config.experiments:
                self._count_for(exposure, scores, kind)

    def _count_for(self, exposure: Exposure, scores: Mapping[str, Score], kind: Kind) -> None:
        experiment, unit = exposure.experiment, exposure.unit
        evidence = self._evidence_of(experiment, exposure.period)
        if evidence is None:
            return
        counted = evidence.arms.setdefault(exposure.arm, Arm())
        counted.exposures += kind == "exposure"
        counted.shadows += kind == "shadow"
        if kind == "exposure" and self._is_new(experiment, unit):
            counted.units += 1
        for name in plan_of(self._config.experiments[experiment]).measures:
            if name in scores:
                whose = f"{unit}\0{exposure.arm}" if kind == "shadow" or name == "preferred" else unit
                before = self._seen(experiment, name, whose)
                distance = self._distance(experiment, name, unit) if MEASURES[name].kind == "mean" else 0.0
                after = counted.tallies.setdefault(name, Tally()).add(MEASURES[name], scores[name], before, distance)
                self._remember(experiment, name, whose, after)

    def _look_for_drift(self, release: str) -> None:
        """When a window of the release is full; then it belongs to the past."""
        recent = self.state.recent[release]
        if recent.get("error", Tally()).count < WINDOW:
            return
        past = self.state.past.setdefault(release, {})
        found = ev.drifted(past, recent, DRIFT_ALPHA)
        for measure in {*found, *self.state.drift.get(release, {})}:
            telemetry.RELEASE_DRIFT.labels(release, measure).set(float(measure in found))
        if found:
            self._drifted.append((release, "; ".join(found.values())))
        self.state.drift[release] = found
        for name, tally in recent.items():
            past.setdefault(name, Tally()).take_in(tally)
        self.state.recent[release] = {}

    def _evidence_of(self, experiment: str, period: int) -> Evidence | None:
        """Of the latest period that anybody has heard of; None for an older one."""
        known = self.state.evidence.get(experiment)
        if known is None or period > known.period:
            if known is not None and self._was_before(experiment, known):
                self._keep_as_before(experiment, known)
            elif known is not None:
                self._outdated.append(self._units_key(experiment, known.period))
            known = self.state.evidence[experiment] = Evidence(period)
            self._units[experiment] = {}
        return known if known.period == period else None

    def _was_before(self, experiment: str, seen: Evidence) -> bool:
        """Only the baseline served, and its users are known."""
        settings = self._config.experiments[experiment]
        served = {arm for arm, each in seen.arms.items() if each.exposures}
        return settings.unit != "request" and not settings.aa and served == {arms_of(settings)[0]}

    def _keep_as_before(self, experiment: str, seen: Evidence) -> None:
        [baseline] = [each for each in seen.arms.values() if each.exposures]
        if experiment in self.state.before:
            self._outdated.append(self._units_key(experiment, self.state.before[experiment].period))
        means = {name: tally.mean for name, tally in baseline.tallies.items() if tally.count}
        self.state.before[experiment] = Before(seen.period, means)
        self._before[experiment] = self._units[experiment]

    def _distance(self, experiment: str, measure: str, unit: str) -> float:
        """Of the unit's mean before the experiment from everybody's; 0 for one that was not there."""
        known = self._before.get(experiment, {}).get(f"{measure}\0{unit}")
        if known is None:
            return 0.0
        total, count = known
        return total / count - self.state.before[experiment].means[measure]

    def _is_new(self, experiment: str, unit: str) -> bool:
        """Whether the unit has not been exposed before."""
        if self._config.experiments[experiment].unit == "request":
            return True
        if self._seen(experiment, "", unit) is not None:
            return False
        self._remember(experiment, "", unit, (0.0, 1))
        return True

    def _seen(self, experiment: str, measure: str, unit: str) -> Seen | None:
        return self._units[experiment].get(f"{measure}\0{unit}")

    def _remember(self, experiment: str, measure: str, unit: str, seen: Seen | None) -> None:
        if seen is None or self._config.experiments[experiment].unit == "request":
            return
        known, field = self._units[experiment], f"{measure}\0{unit}"
        if field in known or len(known) < MOST_UNITS:
            known[field] = seen
            key = self._units_key(experiment, self.state.evidence[experiment].period)
            self._changed[key, field] = seen

    def _units_key(self, experiment: str, period: int) -> str:
        return self._store.key("units", experiment, str(period))

    async def _commit(self, position: str) -> bool:
        changed, self._changed = self._changed, {}
        pairs, self._pairs = self._pairs, []
        flat = [part for where, seen in changed.items() for part in (*where, msgspec.msgpack.encode(seen))]
        done = await self._store.script(
            COMMIT,
            [self._key, stream_of(self._store), pairs_of(self._store)],
            self._position,
            position,
            msgspec.msgpack.encode(self.state),
            MOST_WAITING,
            len(pairs),
            *pairs,
            *flat,
        )
        if done:
            self._position = position
            for key in self._outdated:
                await self._store.delete(key)
            self._outdated.clear()
        return bool(done)

    async def _decide(self) -> None:
        now = time.time()
        for name, experiment in self._config.experiments.items():
            snapshot = self.holder.current
            trial = snapshot.trials[name]
            evidence = self.state.evidence.get(name, Evidence(trial.period))
            decision = self.decisions[name] = decide(experiment, trial, evidence, now)
            for arm in arms_of(experiment)[1:]:
                alarmed = isinstance(decision, Alert) and arm in decision.arms
                telemetry.EXPERIMENT_ALERT.labels(name, arm).set(float(alarmed))
            if isinstance(decision, Advance | RollBack):
                await self._act(name, snapshot, decision, now)
            elif isinstance(decision, Alert):
                await self._note(name, f"worse: {', '.join(decision.arms)}", decision.why)
            if evidence.period == trial.period and ev.shares_differ(evidence, trial.weights) is not None:
                await self._note(name, "sample ratio mismatch", "units did not come to the arms by their shares")

        while self._drifted:
            release, why = self._drifted.pop(0)
            log.warning("release %s has drifted: %s", release, why)
            await self._board.note(Change(self.holder.current.epoch, now, "evaluator", release, "drift", why))

    async def _note(self, name: str, what: str, why: str) -> None:
        """In the log, once a period."""
        period, key = self.holder.current.trials[name].period, f"{name}\0{what}"
        if self.state.alerted.get(key) != period:
            self.state.alerted[key] = period
            log.warning("experiment %s: %s: %s", name, what, why)
            await self._board.note(Change(self.holder.current.epoch, time.time(), "evaluator", name, what, why))

    async def _act(self, name: str, snapshot: Snapshot, step: Advance | RollBack, now: float) -> None:
        experiment = self._config.experiments[name]
        new = carried_out(experiment, name, snapshot, step, now)
        if isinstance(step, RollBack):
            what = f"rolled back {', '.join(step.arms)}"
        else:
            assert experiment.rollout is not None
            what = trials.stage_name(experiment.rollout, step.stage)
        if not await self._board.write(snapshot, new, Change(new.epoch, now, "evaluator", name, what, step.why)):
            self.holder.take(await self._board.read())  # somebody changed something: look again with it
            return
        self.holder.take(new)
        log.warning("experiment %s: %s: %s", name, what, step.why)
        if isinstance(step, RollBack):
            self._deciding[name] = snapshot.trials[name], _copied(self.state.evidence[name])
            for arm in step.arms:
                telemetry.ROLLBACKS.labels(name, arm).inc()

    def _report_when_due(self) -> None:
        """Now and then, when something has come or changed. Intervals take their time, so they are made in a thread, one
        report at a time, and no more often than a tenth of the time: decisions do not wait for them."""
        news = self.state.taken, self.holder.current.epoch, len(self._deciding)
        if self._reporting is not None and self._reporting.done():
            self._reporting.result()
            self._reporting = None
        if self._reporting is None and news != self._told and time.monotonic() >= self._next_report:
            self._told = news
            self._reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        """For whoever asks: a page of JSON in Redis, so that nobody has to ask the evaluator itself."""
        begun = time.monotonic()
        trials, decisions = self.holder.current.trials, dict(self.decisions)
        seen = {name: _copied(each) for name, each in self.state.evidence.items()}
        deciding, self._deciding = self._deciding, {}
        before = {name: evidence for name, (_, evidence) in deciding.items()}
        compared, decided = await asyncio.to_thread(lambda: (self._compared(seen), self._compared(before)))
        for name, (trial, evidence) in deciding.items():
            page = self._page(name, trial, evidence, decided[name])
            self.state.decided[name] = msgspec.json.encode(page)
        watched = await self._watched()
        pages = {}
        for name in self._config.experiments:
            trial = trials[name]
            evidence = seen.get(name, Evidence(trial.period))
            self._track(name, evidence, compared.get(name, []))
            page = self._page(name, trial, evidence, compared.get(name, []))
            known = self.state.decided.get(name) if trial.status == "rolled back" else None
            pages[name] = page | {
                "decided": msgspec.json.decode(known) if known else None,
                "next": getattr(decisions.get(name), "why", ""),
            }
        page = {
            "at": time.time(),
            "taken": self.state.taken,
            "experiments": pages,
            "alerts": report.alerts(pages, decisions, watched, self.state.drift),
            "judged": self.state.judged,
            "canaries": {name: report.looked(each) for name, each in watched.items()},
            "releases": {
                name: {measure: report.told(measure, tally) for measure, tally in tallies.items() if tally.count}
                for name, tallies in self.state.releases.items()
            },
        }
        with contextlib.suppress(StoreAway):
            await self._store.hash_set(self._key, "report", msgspec.json.encode(page))
        self._next_report = time.monotonic() + max(REPORT_S, 9 * (time.monotonic() - begun))

    async def _watched(self) -> dict[str, Watched]:
        """What the canaries said; a Redis that is away is noticed elsewhere."""
        if self._config.evaluation.canaries is None:
            return {}
        with contextlib.suppress(StoreAway):
            return await canaries.known(self._store, list(self._config.releases))
        return {}

    def _compared(self, seen: Mapping[str, Evidence]) -> dict[str, list[Comparison]]:
        known = self._config.experiments
        return {name: ev.compare(plan_of(known[name]), each) for name, each in seen.items() if name in known}

    def _page(self, name: str, trial: Trial, evidence: Evidence, compared: list[Comparison]) -> JsonObject:
        page = report.experiment_page(self._config.experiments[name], trial, evidence, compared)
        report.gauge(name, evidence, page["mismatch"])
        return page | {"track": [list(point) for point in map(msgspec.to_builtins, self.state.tracks.get(name, []))]}

    def _track(self, name: str, evidence: Evidence, compared: list[Comparison]) -> None:
        """A point whenever a twentieth more has come."""
        count = sum(arm.exposures for arm in evidence.arms.values())
        track = self.state.tracks.setdefault(name, [])
        last = track[-1].count if track else 0
        if last < count < last * 1.05:
            return
        if count == last or not count:
            return
        if count < last:  # a new period
            track.clear()
        for each in compared:
            if each.verdict not in ("not measured", "too few"):
                low, high = report.finite(each.interval.low), report.finite(each.interval.high)
                values = each.value, each.baseline_value, low, high
                track.append(Point(evidence.last_at, count, each.measure, each.arm, *values))
        if len(track) > POINTS:
            counts = sorted({point.count for point in track})[::2]
            self.state.tracks[name] = [point for point in track if point.count in counts]
