"""The state of all experiments: Redis owns it, every gateway holds a snapshot and hears of a new one at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace

import msgspec

from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config, Experiment
from gearshift.platform.errors import Conflict, InvalidRequest, NotFound
from gearshift.router import trials
from gearshift.router.arms import Snapshot, arms_of, begin, contents_of

log = logging.getLogger(__name__)

REREAD_S = 1.0

COMPARE_AND_SET = """
-- KEYS[1]: the snapshot, KEYS[2]: the log; ARGV: channel, epoch expected, epoch new, snapshot new, log entry. 1 if it was set.
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if epoch ~= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[3], 'snapshot', ARGV[4])
if ARGV[5] ~= '' then redis.call('RPUSH', KEYS[2], ARGV[5]) end
redis.call('PUBLISH', ARGV[1], ARGV[4])
return 1
"""


class Change(msgspec.Struct, frozen=True):
    """One line of the log: what was done to an experiment, by whom, and why."""

    epoch: int
    at: float
    who: str
    experiment: str
    what: str
    why: str = ""


class SnapshotBoard:
    """Reads and writes the shared snapshot. A write names the epoch it is based on, so no operator overwrites another, and
    leaves its line in the log in the same step."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config
        self._key = store.key("snapshot")
        self._log = store.key("changes")

    async def read(self) -> Snapshot:
        """The shared snapshot; the config's own while nobody has changed it. Raises `StoreAway`."""
        raw = (await self._store.hash_all(self._key)).get("snapshot")
        return self.fitting(msgspec.msgpack.decode(raw, type=Snapshot)) if raw else Snapshot.of(self._config)

    async def open(self) -> Snapshot:
        """Writes down when experiments began that nobody has heard of. Raises `StoreAway`."""
        raw = (await self._store.hash_all(self._key)).get("snapshot")
        stored = msgspec.msgpack.decode(raw, type=Snapshot) if raw else Snapshot()
        fitting = self.fitting(stored)
        fresh = {name for name, trial in fitting.trials.items() if stored.trials.get(name) != trial}
        if fresh:
            epoch = stored.epoch + 1
            begun = {n: replace(trial, period=epoch) if n in fresh else trial for n, trial in fitting.trials.items()}
            await self.write(stored, replace(fitting, epoch=epoch, trials=begun), None)
        return await self.read()

    async def write(self, old: Snapshot, new: Snapshot, change: Change | None) -> bool:
        """False when somebody else was faster. Raises `StoreAway`."""
        encoded, line = msgspec.msgpack.encode(new), msgspec.msgpack.encode(change) if change else b""
        arguments = (self._key, old.epoch, new.epoch, encoded, line)
        return bool(await self._store.script(COMPARE_AND_SET, [self._key, self._log], *arguments))

    async def note(self, change: Change) -> None:
        """A line in the log without a change of the snapshot."""
        await self._store.list_push(self._log, msgspec.msgpack.encode(change))

    async def changes(self) -> list[Change]:
        """The log, oldest first."""
        return [msgspec.msgpack.decode(line, type=Change) for line in await self._store.list_all(self._log)]

    async def set_weights(self, name: str, weights: Mapping[str, float], who: str = "", why: str = "") -> Snapshot:
        """Raises `NotFound`, `InvalidRequest`, or `Conflict` when somebody else was faster."""
        arms = arms_of(self._experiment(name))
        unknown = sorted(set(weights) - set(arms))
        if unknown:
            raise InvalidRequest(f"{name!r} has no arm {unknown[0]!r}; it has: {', '.join(arms)}.", "arms")
        if any(weight < 0 for weight in weights.values()) or sum(weights.values()) <= 0:
            raise InvalidRequest("Weights are at least 0, and one of them is above 0.", "arms")
        whole = {arm: float(weights.get(arm, 0.0)) for arm in arms}
        told = ", ".join(f"{arm} {weight:g}" for arm, weight in whole.items())
        return await self._change(
            name, lambda old: trials.set_by_hand(name, old, whole, time.time(), why), who, f"weights {told}", why
        )

    async def pause(self, name: str, pause: bool, who: str = "", why: str = "") -> Snapshot:
        trial = (await self.read()).trials[self._known(name)]
        if trial.status != ("running" if pause else "paused"):
            raise InvalidRequest(f"{name!r} is {trial.status}.")
        return await self._change(
            name, lambda old: trials.paused(name, old, pause, why), who, "paused" if pause else "resumed", why
        )

    async def advance(self, name: str, who: str = "", why: str = "") -> Snapshot:
        """A person's word goes over what the evidence still lacks."""
        experiment = self._experiment(name)
        trial = (await self.read()).trials[name]
        rollout = experiment.rollout
        if rollout is None or trial.stage < 0 or trial.stage + 1 >= len(rollout.stages):
            raise InvalidRequest(f"{name!r} has no next stage; it is {trial.status}.")
        step = trials.Advance(trial.stage + 1, why or "by hand")
        return await self._decided(name, step, who, trials.stage_name(rollout, step.stage), why)

    async def abort(self, name: str, who: str = "", why: str = "") -> Snapshot:
        """Everything goes back to the baseline."""
        arms = tuple(arms_of(self._experiment(name))[1:])
        return await self._decided(name, trials.RollBack(arms, why or "by hand"), who, "rolled back", why)

    async def follow(self, holder: SnapshotHolder) -> None:
        """Keeps `holder` up to date until cancelled: reads once it is subscribed, so that nothing falls in between, and
        again after a lost connection."""
        while True:
            try:
                async with aclosing(self._store.listen(self._key)) as changes:
                    async for raw in changes:
                        if raw:
                            holder.take(self.fitting(msgspec.msgpack.decode(raw, type=Snapshot)))
                        else:
                            await self._reconcile(holder)
            except StoreAway:
                log.debug("no news about weights; serving with epoch %d", holder.current.epoch)
            await asyncio.sleep(REREAD_S)

    async def _decided(
        self, name: str, step: trials.Advance | trials.RollBack, who: str, what: str, why: str
    ) -> Snapshot:
        experiment = self._experiment(name)
        return await self._change(
            name, lambda old: trials.carried_out(experiment, name, old, step, time.time()), who, what, why
        )

    async def _change(
        self, name: str, change: Callable[[Snapshot], Snapshot], who: str, what: str, why: str
    ) -> Snapshot:
        self._known(name)
        old = await self.read()
        new = change(old)
        if not await self.write(old, new, Change(new.epoch, time.time(), who, name, what, why)):
            raise Conflict("Somebody else changed the experiments at the same time; look at them and try again.")
        return new

    def _known(self, name: str) -> str:
        if name not in self._config.experiments:
            known = ", ".join(self._config.experiments) or "none"
            raise NotFound(f"There is no experiment {name!r}; there are: {known}.")
        return name

    def _experiment(self, name: str) -> Experiment:
        return self._config.experiments[self._known(name)]

    async def _reconcile(self, holder: SnapshotHolder) -> None:
        """Takes what Redis has; gives back what Redis has lost, or its next epoch would be one that nobody takes."""
        stored = await self.read()
        holder.take(stored)
        if stored.epoch < holder.current.epoch:
            await self.write(stored, holder.current, None)

    def fitting(self, snapshot: Snapshot) -> Snapshot:
        """Experiments of the config only; one whose arms are other ones by now, or answer differently, begins anew."""
        fitting = {}
        for name, known in self._config.experiments.items():
            stored, contents = snapshot.trials.get(name), contents_of(self._config, name)
            fits = stored is not None and stored.contents == contents and set(stored.weights) <= set(contents)
            fresh = begin(known, time.time(), contents, snapshot.fallen)
            fitting[name] = stored if stored is not None and fits else fresh
        return replace(snapshot, trials=fitting)


class SnapshotHolder:
    """The snapshot a gateway serves with. A request reads it once and keeps what it read."""

    def __init__(self, initial: Snapshot) -> None:
        self.current = initial

    def take(self, snapshot: Snapshot) -> None:
        if snapshot.epoch > self.current.epoch:
            self.current = snapshot
