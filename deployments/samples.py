"""The way of a finished request to the evaluator: a stream in Redis. Nobody waits for it, and it waits for the evaluator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config
from gearshift.platform.errors import NotFound
from gearshift.platform.request import Delta
from gearshift.platform.samples import Asked, Feedback, Judged, Sample
from gearshift.platform.telemetry import SAMPLES_LOST, Record
from gearshift.router.arms import Served

log = logging.getLogger(__name__)

FLUSH_S = 0.05
KEPT = 10_000
"""Samples that a gateway keeps while Redis is away."""
BATCH = 500

PUT = """
-- KEYS[1]: the stream; ARGV: most entries, ms that requests are known, prefix of their keys, then id, asked, sample of each
for i = 4, #ARGV, 3 do
  if ARGV[i + 1] ~= '' then redis.call('SET', ARGV[3] .. ARGV[i], ARGV[i + 1], 'PX', ARGV[2]) end
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 's', ARGV[i + 2])
end
return 1
"""
PUT_FEEDBACK = """
-- KEYS: the stream, what is known of the request, its feedback; ARGV: most entries, ms, tenant, feedback.
-- 0: no such request of this tenant; 1: taken; 2: there was one before, which is the one that counts
local asked = redis.call('GET', KEYS[2])
if not asked then return 0 end
local known = cmsgpack.unpack(asked)
if known['tenant'] ~= ARGV[3] then return 0 end
local first = redis.call('SET', KEYS[3], '1', 'NX', 'PX', ARGV[2])
if first then redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'f', ARGV[4], 'a', asked) end
return first and 1 or 2
"""


class SampleLog:
    """Owns what was not yet told. One a gateway."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._waiting: deque[tuple[str, bytes, bytes]] = deque()
        self.follow(config)

    def follow(self, config: Config) -> None:
        """Another revision's settings, from now on."""
        self._settings = config.evaluation
        self.enabled = self._settings.enabled
        self.wants_text = self._settings.enabled and self._settings.text_chars > 0
        self.max_shadows = self._settings.max_shadows if self._settings.enabled else 0

    def told(self, record: Record, heard: Heard) -> None:
        """A request has ended. One that was refused before anybody knew what it wants is none."""
        if not self._settings.enabled or not record.release:
            return
        for place, sample in enumerate(samples_of(record, heard, self._settings.text_chars)):
            # feedback on a request is about the answer that was given, which is the first of its samples
            asked = Asked(tenant=sample.tenant, release=sample.release, exposures=sample.exposures)
            self._put_by(sample, asked if place == 0 and sample.status == 200 else None)

    def shadowed(self, record: Record, heard: Heard, rival: str) -> None:
        """An arm in the shadow has answered; `rival` is what the client got. Its times say nothing: it waited for everybody."""
        sample = _answered(record, heard, self._settings.text_chars)
        seen = (record.exposure,) if record.exposure else ()
        hidden = {"exposures": seen, "shadow": True, "rival": rival[: self._settings.text_chars]}
        times = {"ttft_s": None, "inter_token_s": None, "duration_s": None}
        self._put_by(msgspec.structs.replace(sample, **hidden, **times), None)

    def _put_by(self, sample: Sample, asked: Asked | None) -> None:
        if len(self._waiting) >= KEPT:
            self._waiting.popleft()
            SAMPLES_LOST.inc()
        known = msgspec.msgpack.encode(asked) if asked else b""
        self._waiting.append((sample.request_id, known, msgspec.msgpack.encode(sample)))

    async def run(self) -> None:
        """Tells the evaluator, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """What can't be told now is kept for the next time."""
        ttl_ms = int(self._settings.feedback_ttl_s * 1000)
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            arguments = [part for entry in batch for part in entry]
            prefix = self._store.key("asked", "")
            try:
                await self._store.script(
                    PUT, [stream_of(self._store)], self._settings.buffer, ttl_ms, prefix, *arguments
                )
            except StoreAway:
                self._waiting.extendleft(reversed(batch))
                return
            except asyncio.CancelledError:
                self._waiting.extendleft(reversed(batch))
                raise

    async def feedback(self, feedback: Feedback) -> bool:
        """Whether it counts: only the first on each request does. Raises `NotFound` for a request that this tenant never
        made, or too long ago, and `StoreAway`."""
        for wait in (0.0, 2 * FLUSH_S, 4 * FLUSH_S):  # the request may have ended just now, in another gateway
            await self.flush()
            await asyncio.sleep(wait)
            taken = await self._put(feedback)
            if taken:
                return taken == 1
        raise NotFound(f"There is no request {feedback.request_id!r} to give feedback on, or it was too long ago.")

    async def _put(self, feedback: Feedback) -> int:
        request_id, keys = feedback.request_id, self._store.key
        return int(
            await self._store.script(
                PUT_FEEDBACK,
                [stream_of(self._store), keys("asked", request_id), keys("feedback", request_id)],
                self._settings.buffer,
                int(self._settings.feedback_ttl_s * 1000),
                feedback.tenant,
                msgspec.msgpack.encode(feedback),
            )
        )


def stream_of(store: Store) -> str:
    return store.key("samples")


@dataclass(slots=True)
class Heard:
    """What a request said and was answered, while it lasts; nothing of it is in its record."""

    wanted: bool
    trace: str = ""
    question: str = ""
    pieces: list[str] = field(default_factory=list)
    failed: list[Served] = field(default_factory=list)
    """Arms that were asked and could not answer, so that another tier did."""

    def hear(self, delta: Delta) -> None:
        if self.wanted and delta.text and delta.choice == 0 and not delta.echo:
            self.pieces.append(delta.text)


def samples_of(record: Record, heard: Heard, limit: int) -> list[Sample]:
    """The request, and after it what it saw of arms that failed it: their errors must not vanish behind a fallback."""
    answered = _answered(record, heard, limit)
    return [answered, *(_failed(record, served) for served in heard.failed if served.exposure)]


def _failed(record: Record, served: Served) -> Sample:
    return Sample(
        request_id=record.request_id,
        tenant=record.tenant,
        at=record.ended_ns / 1e9,
        tier=served.tier,
        release=served.release,
        exposures=(served.exposure,) if served.exposure else (),
        status=503,
        error="engine_unavailable",
    )


def _answered(record: Record, heard: Heard, limit: int) -> Sample:
    ended = record.ended_ns / 1e9 or time.time()
    first = (record.first_token_ns - record.started_ns) / 1e9 if record.first_token_ns else None
    tokens = record.usage.completion_tokens if record.usage else 0
    between = (record.ended_ns - record.first_token_ns) / 1e9 / (tokens - 1) if first and tokens > 1 else None
    answer = "".join(heard.pieces)
    used = not record.replayed and not record.fallbacks
    return Sample(
        request_id=record.request_id,
        tenant=record.tenant,
        at=ended,
        tier=record.tier,
        release=record.release,
        exposures=tuple(each for each in (record.exposure, record.routed_by) if each) if used else (),
        cache=record.cache,
        status=record.status,
        error=record.error,
        finish_reason=record.finish_reason,
        ttft_s=first if not record.replayed else None,
        inter_token_s=between if not record.replayed else None,
        duration_s=(record.ended_ns - record.started_ns) / 1e9,
        prompt_tokens=record.usage.prompt_tokens if record.usage else 0,
        completion_tokens=tokens,
        cost_dollars=record.cost_dollars,
        blocked=any(note.stage == "output" and note.action in ("redact", "block") for note in record.verdicts),
        question=heard.question[:limit],
        answer=answer[:limit],
        has_text=heard.wanted,
        trace=heard.trace,
    )


def decode(fields: dict[bytes, bytes]) -> Sample | Judged | tuple[Asked, Feedback]:
    """An entry of the stream."""
    if b"j" in fields:
        return msgspec.msgpack.decode(fields[b"j"], type=Judged)
    if b"s" in fields:
        return msgspec.msgpack.decode(fields[b"s"], type=Sample)
    return msgspec.msgpack.decode(fields[b"a"], type=Asked), msgspec.msgpack.decode(fields[b"f"], type=Feedback)
