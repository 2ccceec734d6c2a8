"""Holds an answer back until it is judged: nothing of one that is given up reaches the client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from gearshift.platform.request import Delta, SamplingParams, Usage
from gearshift.router.answers import Attempt, Certainty
from gearshift.router.router import Judgement

Judge = Callable[[Attempt], Awaitable[Judgement]]


class GivenUp(Exception):
    """The answer was not good enough. `usage` is what it cost, as far as it got."""

    def __init__(self, judgement: Judgement, usage: Usage) -> None:
        super().__init__(judgement.reason)
        self.judgement = judgement
        self.usage = usage


async def verified(
    deltas: AsyncGenerator[Delta, None], judge: Judge, window_tokens: int | None
) -> AsyncGenerator[Delta, None]:
    """Passes the answer on once its first `window_tokens` are judged good enough (None: all of it), or raises `GivenUp`, which
    stops the engine."""
    held: list[Delta] = []
    async with aclosing(deltas):
        async for delta in deltas:
            held.append(delta)
            if delta.finish_reason or (window_tokens and sum(each.tokens for each in held) >= window_tokens):
                break
        judgement = await judge(attempt(held))
        if not judgement.accepted:
            raise GivenUp(judgement, _usage(held))
        for delta in held:
            yield delta
        async for delta in deltas:
            yield delta


def attempt(held: list[Delta]) -> Attempt:
    certainty = Certainty(
        [value for delta in held for value in delta.logprobs], [value for delta in held for value in delta.entropies]
    )
    return Attempt("".join(delta.text for delta in held), certainty, whole=bool(held and held[-1].finish_reason))


def _usage(held: list[Delta]) -> Usage:
    """An answer that was cut off told no usage; its prompt is not known here, its tokens are."""
    return held[-1].usage or Usage(0, sum(delta.tokens for delta in held))


Again = Callable[[int], Awaitable[str]]


def second_sample(ask: Callable[[int, SamplingParams], AsyncGenerator[Delta, None]], sampling: SamplingParams) -> Again:
    """Asks the same tier once more for a short answer, drawn at temperature 0.7: what it says again, it is sure of
    (self-consistency, Wang et al. 2022, arXiv 2203.11171)."""

    async def again(tokens: int) -> str:
        short = replace(sampling, temperature=0.7, seed=0, max_tokens=tokens, certainty=False)
        async with aclosing(ask(1, short)) as deltas:
            return "".join([delta.text async for delta in deltas])

    return again
