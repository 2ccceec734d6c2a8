"""The judge at work: pairs of answers wait in Redis, and what it says of them comes back as samples, each once."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from gearshift.deployments.call import cost
from gearshift.deployments.prober import Prober
from gearshift.deployments.samples import stream_of
from gearshift.eval import judge
from gearshift.eval.judge import Preference
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config
from gearshift.platform.request import Usage
from gearshift.platform.samples import Exposure, Judged, Sample
from gearshift.platform.telemetry import JUDGE_COST, JUDGED
from gearshift.router.arms import PARTS, part_of

log = logging.getLogger(__name__)

IDLE_S = 0.25
AWAY_S = 2.0
MOST_WAITING = 1000
DAY_S = 86400
OVER_CAP = Preference(None, "over the cap")

DONE = """
-- KEYS: pairs, samples, what was spent today; ARGV: pair, most samples, verdict, dollars, ms that the day is known
-- 0 when somebody else has judged it
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'j', ARGV[3])
redis.call('HINCRBYFLOAT', KEYS[3], 'dollars', ARGV[4])
redis.call('HINCRBY', KEYS[3], 'pairs', 1)
redis.call('PEXPIRE', KEYS[3], ARGV[5])
return 1
"""


class Pair(msgspec.Struct, frozen=True):
    """An answer in the shadow, and the one that the client got."""

    request_id: str
    release: str
    exposures: tuple[Exposure, ...]
    question: str
    answer: str
    rival: str
    trace: str = ""


def pairs_of(store: Store) -> str:
    return store.key("pairs")


def chosen(sample: Sample, share: float) -> list[bytes]:
    """The pair that a shadow makes, when it is among those to be judged."""
    if not sample.rival or part_of("judge", sample.request_id) >= share * PARTS:
        return []
    texts = sample.question, sample.answer, sample.rival
    return [msgspec.msgpack.encode(Pair(sample.request_id, sample.release, sample.exposures, *texts, sample.trace))]


class Judge:
    """Takes one pair after the other, until the day's cap."""

    def __init__(self, config: Config, store: Store, prober: Prober) -> None:
        assert config.evaluation.judge is not None
        self._settings = config.evaluation.judge
        self._buffer = config.evaluation.buffer
        self._store = store
        self._prober = prober

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                if not await self.step():
                    await asyncio.sleep(IDLE_S)
            except StoreAway:
                await asyncio.sleep(AWAY_S)

    async def step(self) -> bool:
        """False when no pair waits, or nobody can judge it. Raises `StoreAway`."""
        waiting = await self._store.list_first(pairs_of(self._store))
        if waiting is None or not self._prober.ready(self._settings.release):
            return False
        pair = msgspec.msgpack.decode(waiting, type=Pair)
        spent_key = self._store.key("judge", time.strftime("%Y-%m-%d", time.gmtime()))
        spent = await self._store.hash_all(spent_key)
        if self._over(spent):
            await self._done(waiting, pair, OVER_CAP, 0.0, spent_key)
            return True
        told, usage = await self.preference(pair.question, pair.answer, pair.rival)
        await self._done(waiting, pair, told, cost(usage, self._settings.price), spent_key)
        return True

    async def preference(self, asked: str, answer: str, rival: str) -> tuple[Preference, Usage]:
        """Asks twice, in both orders, and tells what it took."""
        if answer.strip() == rival.strip():
            return judge.SAME, Usage(0, 0)
        forth, back = await asyncio.gather(
            *(
                self._prober.ask(self._settings.release, judge.question(asked, *pair), judge.MAX_TOKENS)
                for pair in ((answer, rival), (rival, answer))
            )
        )
        usage = Usage(
            forth.usage.prompt_tokens + back.usage.prompt_tokens,
            forth.usage.completion_tokens + back.usage.completion_tokens,
        )
        if forth.error or back.error:
            return Preference(None, forth.error or back.error), usage
        return judge.preference(forth.text, back.text), usage

    def _over(self, spent: dict[str, bytes]) -> bool:
        dollars, pairs = float(spent.get("dollars", b"0")), int(spent.get("pairs", b"0"))
        cap = self._settings.max_cost_per_day
        return pairs >= self._settings.max_pairs_per_day or (cap is not None and dollars >= cap)

    async def _done(self, waiting: bytes, pair: Pair, told: Preference, dollars: float, spent_key: str) -> None:
        verdict = Judged(
            request_id=pair.request_id,
            measure="preferred",
            release=pair.release,
            exposures=pair.exposures,
            value=told.value,
            label=told.label,
            trace=pair.trace,
        )
        keys = [pairs_of(self._store), stream_of(self._store), spent_key]
        encoded = msgspec.msgpack.encode(verdict)
        if await self._store.script(DONE, keys, waiting, self._buffer, encoded, dollars, 2 * DAY_S * 1000):
            JUDGED.labels(told.label).inc()
            JUDGE_COST.inc(dollars)
