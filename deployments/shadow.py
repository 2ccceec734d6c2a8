"""Requests that are also sent to arms nobody sees: after the client has its answer, as batch work, and never at its cost."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import replace

from gearshift.deployments.call import Call, Candidate, Ticket
from gearshift.deployments.pipeline import Pipeline, without_text
from gearshift.deployments.samples import Heard, SampleLog
from gearshift.platform.errors import Overloaded, ShuttingDown, public
from gearshift.platform.telemetry import SHADOWS, Record

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0


class Shadows:
    """Owns the shadows of one gateway: a bounded number at a time. One that finds no room is left out, and counted."""

    def __init__(self, samples: SampleLog) -> None:
        self._samples = samples
        self._running: set[asyncio.Task[None]] = set()

    def offer(self, pipeline: Pipeline, call: Call, ticket: Ticket) -> None:
        """A request has ended; its arms in the shadow are asked too, if there are any."""
        for candidate in pipeline.in_shadow(ticket.record):
            if pipeline.draining or len(self._running) >= self._samples.max_shadows:
                _count(candidate, "left out")
                continue
            task = asyncio.create_task(self._ask(pipeline, call, candidate, ticket))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _ask(self, pipeline: Pipeline, call: Call, candidate: Candidate, ticket: Ticket) -> None:
        """What hinders it is not the arm's fault unless it is the arm's: a full queue is none."""
        record = Record(f"{call.id}-shadow", tenant=ticket.record.tenant)
        heard = Heard(ticket.heard.wanted, ticket.heard.trace, ticket.heard.question)
        body = call.body.model_copy(update={"n": None, "stream": None, "service_tier": "flex"})
        hidden = replace(call, id=record.request_id, body=body, use="never")
        pipeline.hidden += 1
        try:
            async with asyncio.timeout(TIMEOUT_S), aclosing(pipeline.answer(hidden, candidate, record)) as deltas:
                async for delta in deltas:
                    heard.hear(delta)
            record.status = 200
        except (Overloaded, ShuttingDown, TimeoutError):
            _count(candidate, "left out")
            return
        except Exception as error:
            shown = public(error)
            record.status, record.error = shown.status, without_text(shown)
        finally:
            pipeline.hidden -= 1
        record.ended_ns = time.time_ns()
        self._samples.shadowed(record, heard, "".join(ticket.heard.pieces))
        _count(candidate, "answered" if record.status == 200 else record.error)


def _count(candidate: Candidate, result: str) -> None:
    assert candidate.served.exposure is not None
    SHADOWS.labels(candidate.served.exposure.experiment, candidate.served.exposure.arm, result).inc()
