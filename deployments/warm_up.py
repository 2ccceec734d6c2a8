"""What an engine has to answer before any traffic goes there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing

from gearshift.deployments import registry
from gearshift.deployments.remote import RemoteEngine
from gearshift.platform.cache.store import Store
from gearshift.platform.config import WarmUp
from gearshift.platform.errors import GearshiftError
from gearshift.platform.request import Message, Request, SamplingParams

TIMEOUT_S = 120.0
SHOWN_CHARS = 80


class StartFailed(GearshiftError):
    """The deployment did not come up. Seen by operators only."""

    code = "start_failed"


async def warm_up(store: Store, wanted: Mapping[str, Sequence[WarmUp]], node: str, secret: str) -> None:
    """Takes the store over; node and secret are how this process reaches engines. Raises
    `StartFailed` for the first engine that does not answer as expected."""
    try:
        members = await registry.members(store)
    finally:
        await store.close()
    for key, questions in wanted.items():
        engine = RemoteEngine(key, secret=secret)
        await engine.refresh(member.reached_from(node) for member in members if member.model == key)
        try:
            for number, question in enumerate(questions):
                await _ask(engine, key, number, question)
        finally:
            await engine.close()


async def _ask(engine: RemoteEngine, key: str, number: int, question: WarmUp) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=question.max_tokens)
    request = Request(f"warm-up-{number}", (Message("user", question.ask),), sampling)
    try:
        async with asyncio.timeout(TIMEOUT_S), aclosing(engine.generate(request)) as deltas:
            said = "".join([delta.text async for delta in deltas])
    except (GearshiftError, TimeoutError) as error:
        problem = str(error) or type(error).__name__
        raise StartFailed(f"{key} does not answer its warm-up question {question.ask!r}: {problem}") from error
    if question.expect is not None and question.expect.lower() not in said.lower():
        raise StartFailed(
            f"{key} answers its warm-up question {question.ask!r} with {said[:SHOWN_CHARS]!r}, which does not contain "
            f"{question.expect!r}"
        )
