"""The weights of all experiments: Redis owns them, every gateway holds a snapshot and hears of a new one at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing

import msgspec

from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config
from gearshift.platform.errors import Conflict, InvalidRequest, NotFound
from gearshift.router.arms import Snapshot

log = logging.getLogger(__name__)

REREAD_S = 1.0

COMPARE_AND_SET = """
-- KEYS[1]: the snapshot; ARGV: channel, epoch expected, epoch new, snapshot new. 1 if it was set.
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if epoch ~= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[3], 'snapshot', ARGV[4])
redis.call('PUBLISH', ARGV[1], ARGV[4])
return 1
"""


class SnapshotBoard:
    """Reads and writes the shared snapshot. A write names the epoch it is based on, so no operator overwrites another."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config
        self._key = store.key("snapshot")

    async def read(self) -> Snapshot:
        """The shared snapshot; the config's own while nobody has changed it. Raises `StoreAway`."""
        raw = (await self._store.hash_all(self._key)).get("snapshot")
        return self._fitting(msgspec.msgpack.decode(raw, type=Snapshot)) if raw else Snapshot.of(self._config)

    async def set_weights(self, experiment: str, weights: Mapping[str, float]) -> Snapshot:
        """Raises `NotFound`, `InvalidRequest`, or `Conflict` when somebody else was faster."""
        known = self._config.experiments.get(experiment)
        if known is None:
            raise NotFound(f"There is no experiment {experiment!r}; there are: {', '.join(self._config.experiments)}.")
        unknown = sorted(set(weights) - set(known.arms))
        if unknown:
            raise InvalidRequest(f"{experiment!r} has no arm {unknown[0]!r}; it has: {', '.join(known.arms)}.", "arms")
        if any(weight < 0 for weight in weights.values()) or sum(weights.values()) <= 0:
            raise InvalidRequest("Weights are at least 0, and one of them is above 0.", "arms")
        old = await self.read()
        arms = {arm: float(weights.get(arm, 0.0)) for arm in known.arms}
        new = Snapshot(old.epoch + 1, {**old.weights, experiment: arms})
        if not await self._replace(old.epoch, new):
            raise Conflict("Somebody else changed the weights at the same time; look at them and try again.")
        return new

    async def follow(self, holder: SnapshotHolder) -> None:
        """Keeps `holder` up to date until cancelled: reads once it is subscribed, so that nothing falls in between, and
        again after a lost connection."""
        while True:
            try:
                async with aclosing(self._store.listen(self._key)) as changes:
                    async for raw in changes:
                        if raw:
                            holder.take(self._fitting(msgspec.msgpack.decode(raw, type=Snapshot)))
                        else:
                            await self._reconcile(holder)
            except StoreAway:
                log.debug("no news about weights; serving with epoch %d", holder.current.epoch)
            await asyncio.sleep(REREAD_S)

    async def _reconcile(self, holder: SnapshotHolder) -> None:
        """Takes what Redis has; gives back what Redis has lost, or its next epoch would be one that nobody takes."""
        stored = await self.read()
        holder.take(stored)
        if stored.epoch < holder.current.epoch:
            await self._replace(stored.epoch, holder.current)

    async def _replace(self, expected_epoch: int, new: Snapshot) -> bool:
        encoded = msgspec.msgpack.encode(new)
        arguments = (self._key, expected_epoch, new.epoch, encoded)
        return bool(await self._store.script(COMPARE_AND_SET, [self._key], *arguments))

    def _fitting(self, snapshot: Snapshot) -> Snapshot:
        """Experiments of the config only; one whose arms have changed since starts from the config's weights."""
        arms = {
            name: snapshot.weights[name] if set(snapshot.weights.get(name, {})) == set(known.arms) else dict(known.arms)
            for name, known in self._config.experiments.items()
        }
        return Snapshot(snapshot.epoch, arms)


class SnapshotHolder:
    """The snapshot a gateway serves with. A request reads it once and keeps what it read."""

    def __init__(self, initial: Snapshot) -> None:
        self.current = initial

    def take(self, snapshot: Snapshot) -> None:
        if snapshot.epoch > self.current.epoch:
            self.current = snapshot
