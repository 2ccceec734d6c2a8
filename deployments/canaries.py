"""Fixed questions, asked of every release on a schedule; each release is compared with its own past."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gearshift.deployments.prober import Prober
from gearshift.deployments.samples import stream_of
from gearshift.eval import canary, jsonl
from gearshift.eval.canary import Canary, Watched
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config
from gearshift.platform.errors import ConfigError
from gearshift.platform.samples import Judged
from gearshift.platform.telemetry import CANARY

log = logging.getLogger(__name__)

LOOK_S = 1.0

TAKE_ROUND = """
-- KEYS: what is known of releases, samples; ARGV: release, known before, known now, most samples, then each score.
-- 0 when somebody else has made the round
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
for i = 5, #ARGV do redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'j', ARGV[i]) end
return 1
"""


def questions_of(config: Config) -> list[Canary]:
    """Raises `ConfigError` for a file that is missing, damaged, or has an id twice."""
    settings = config.evaluation.canaries
    if settings is None:
        return []
    found = jsonl.read(Path(settings.file), Canary)
    seen: set[str] = set()
    for each in found:
        if each.id in seen:
            raise ConfigError(f"evaluation.canaries: {settings.file}: the id {each.id!r} is there twice")
        seen.add(each.id)
    return found


class Canaries:
    """Owns the schedule; what is known of each release is in Redis."""

    def __init__(self, config: Config, store: Store, prober: Prober) -> None:
        assert config.evaluation.canaries is not None
        self._settings = config.evaluation.canaries
        self._buffer = config.evaluation.buffer
        self._releases = list(config.releases)
        self._questions = questions_of(config)
        self._store = store
        self._key = store.key("canaries")
        self._prober = prober

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                for release in self._releases:
                    await self.look(release, time.time())
            except StoreAway:
                log.debug("canaries wait for Redis")
            await asyncio.sleep(LOOK_S)

    async def look(self, release: str, now: float) -> Watched | None:
        """A round, when it is time for one. Raises `StoreAway`."""
        stored = (await self._store.hash_all(self._key)).get(release, b"")
        watched = msgspec.msgpack.decode(stored, type=Watched) if stored else Watched()
        fingerprint = self._prober.fingerprint(release)
        if watched.fingerprint != fingerprint:  # other weights, another prompt: nothing to compare with
            watched = Watched(fingerprint)
        if now - watched.at < self._settings.every_s or not self._prober.ready(release):
            return None
        well, failed = await self._round(release, watched)
        canary.take_round(watched, well, failed, now)
        scores = [
            msgspec.msgpack.encode(
                Judged(request_id=f"canary_{name}", measure="canary", release=release, value=float(told))
            )
            for name, told in well.items()
        ]
        keys, known = [self._key, stream_of(self._store)], msgspec.msgpack.encode(watched)
        if not await self._store.script(TAKE_ROUND, keys, release, stored, known, self._buffer, *scores):
            return None
        CANARY.labels(release).set(sum(well.values()) / len(well))
        if watched.worse:
            log.warning("release %s: %s", release, watched.worse)
        return watched

    async def _round(self, release: str, watched: Watched) -> tuple[dict[str, bool], int]:
        """Whether each question was answered well, and how many had no answer: those are not."""
        well, failed = {}, 0
        for question in self._questions:
            said = await self._prober.ask(release, question.question, self._settings.max_tokens)
            if said.error:
                failed += 1
                well[question.id] = False
                continue
            well[question.id] = canary.is_well(question, said.text, watched.first.get(question.id))
            watched.first.setdefault(question.id, canary.digest(said.text))
        return well, failed


async def known(store: Store, releases: Sequence[str]) -> dict[str, Watched]:
    """What the last rounds said. Raises `StoreAway`."""
    stored = await store.hash_all(store.key("canaries"))
    return {name: msgspec.msgpack.decode(stored[name], type=Watched) for name in releases if name in stored}
