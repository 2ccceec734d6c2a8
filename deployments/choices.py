"""Several answers to one request (`n`), as one stream in which each Delta says whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec

from gearshift.platform.request import Delta, SamplingParams, Usage

Begin = Callable[[], AsyncGenerator[Delta, None]]


def of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """A seeded request repeats as a whole, but its choices differ from each other."""
    seed = None if sampling.seed is None else sampling.seed + choice
    return replace(sampling, seed=seed)


@dataclass(slots=True)
class _Tally:
    """Counts what is still running, and adds up the usage: the prompt once, the answers all."""

    running: int
    usages: list[Usage] = field(default_factory=list)

    def mark(self, choice: int, delta: Delta) -> Delta:
        """The Delta as the client sees it: the usage of all comes with the last that ends."""
        if delta.finish_reason is None:
            return msgspec.structs.replace(delta, choice=choice)
        self.running -= 1
        if delta.usage is not None:
            self.usages.append(delta.usage)
        return msgspec.structs.replace(delta, choice=choice, usage=None if self.running else self._total())

    def _total(self) -> Usage | None:
        if not self.usages:
            return None
        answers = sum(usage.completion_tokens for usage in self.usages)
        first = min(self.usages, key=lambda usage: usage.cached_tokens)  # the one that computed the prompt
        return Usage(first.prompt_tokens, answers, first.cached_tokens)


async def several(answers: Sequence[Begin]) -> AsyncGenerator[Delta, None]:
    """The first begins alone; the others follow when its first token is there, and find its prompt in the prefix cache.

    Closing the generator closes them all. One that fails fails them all.
    """
    inbox: asyncio.Queue[tuple[int, Delta | BaseException]] = asyncio.Queue()
    tally = _Tally(len(answers))

    async def pump(choice: int, deltas: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    inbox.put_nowait((choice, delta))
        except Exception as error:
            inbox.put_nowait((choice, error))

    tasks = [asyncio.create_task(pump(0, answers[0]()))]
    try:
        while tally.running:
            choice, item = await inbox.get()
            if isinstance(item, BaseException):
                raise item
            if len(tasks) == 1:
                tasks += [asyncio.create_task(pump(other, answers[other]())) for other in range(1, len(answers))]
            yield tally.mark(choice, item)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
