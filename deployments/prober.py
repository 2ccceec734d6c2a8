"""Asks releases on the platform's own behalf: as batch work, of no tenant, past limits and caches, with nobody waiting."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass

from gearshift.deployments.call import Call, Candidate
from gearshift.deployments.pipeline import Pipeline, without_text
from gearshift.platform.errors import public
from gearshift.platform.openai import ChatRequest
from gearshift.platform.request import Usage
from gearshift.platform.telemetry import Record
from gearshift.router.arms import Served

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Said:
    """error: name of what went wrong; empty for an answer."""

    text: str
    usage: Usage
    error: str = ""


class Prober:
    """Over one revision's pipeline, so that an answer is what a client would get: with the release's prompt and guardrails."""

    def __init__(self, pipeline: Pipeline, away: Callable[[], Collection[str]] = tuple) -> None:
        """away: models that no engine serves just now."""
        self._pipeline = pipeline
        self._away = away

    def ready(self, release: str) -> bool:
        """Whether there is anybody to ask; an engine that starts or ends is not a release that fails."""
        return self._pipeline.model_of(release) not in self._away()

    def fingerprint(self, release: str) -> str:
        return self._pipeline.fingerprints[release]

    async def ask(self, release: str, text: str, max_tokens: int) -> Said:
        """Greedy."""
        record = Record(f"probe_{uuid.uuid4().hex}")
        body = ChatRequest.model_validate(
            {
                "model": release,
                "messages": [{"role": "user", "content": text}],
                "temperature": 0.0,
                "max_completion_tokens": max_tokens,
                "service_tier": "flex",
            }
        )
        call, candidate = Call(record.request_id, body, use="never"), Candidate(Served("", release))
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                aclosing(self._pipeline.answer(call, candidate, record)) as deltas,
            ):
                said = "".join([delta.text async for delta in deltas])
        except Exception as error:
            return Said("", record.usage or Usage(0, 0), without_text(public(error)))
        return Said(said, record.usage or Usage(0, 0))
