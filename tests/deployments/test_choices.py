"""Several answers to one request, merged: whose piece is whose, usage, failures, and nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gearshift.deployments.choices import of_choice, several
from gearshift.platform.errors import EngineUnavailable
from gearshift.platform.request import Delta, SamplingParams, Usage

pytestmark = pytest.mark.anyio


class Answers:
    """Answers of different lengths; remembers who began when and who was closed."""

    def __init__(self, *lengths: int, breaks: int | None = None) -> None:
        self.lengths, self.breaks = lengths, breaks
        self.begun: list[int] = []
        self.closed: list[int] = []

    def begins(self) -> list[Any]:
        return [lambda choice=choice: self._answer(choice) for choice in range(len(self.lengths))]

    async def _answer(self, choice: int) -> AsyncGenerator[Delta, None]:
        self.begun.append(choice)
        try:
            for n in range(self.lengths[choice]):
                await asyncio.sleep(0)
                if choice == self.breaks and n == 1:
                    raise EngineUnavailable("gone")
                yield Delta(f"{choice}{n} ")
            yield Delta("", "stop", Usage(10, self.lengths[choice], 8 if choice else 0))
        finally:
            self.closed.append(choice)


async def test_pieces_say_whose_they_are_and_the_last_has_the_usage_of_all() -> None:
    answers = Answers(3, 5, 2)
    deltas = [delta async for delta in several(answers.begins())]
    for choice, length in enumerate(answers.lengths):
        mine = [delta for delta in deltas if delta.choice == choice]
        assert "".join(delta.text for delta in mine) == "".join(f"{choice}{n} " for n in range(length))
        assert mine[-1].finish_reason == "stop"
    assert [delta.usage for delta in deltas if delta.usage] == [Usage(10, 10, 0)]
    assert deltas[-1].usage is not None


async def test_the_others_begin_when_the_first_has_a_token() -> None:
    answers = Answers(3, 3)
    stream = several(answers.begins())
    assert (await anext(stream)).choice == 0
    assert answers.begun == [0]
    await anext(stream)
    await stream.aclose()
    assert sorted(answers.closed) == answers.begun


async def test_closing_closes_all_and_a_failure_fails_all() -> None:
    answers = Answers(50, 50, 50)
    stream = several(answers.begins())
    for _ in range(5):
        await anext(stream)
    await stream.aclose()
    assert sorted(answers.closed) == [0, 1, 2]
    broken = Answers(50, 50, breaks=1)
    with pytest.raises(EngineUnavailable):
        async for _ in several(broken.begins()):
            pass
    assert sorted(broken.closed) == [0, 1]


def test_seeds_of_choices_differ_and_repeat() -> None:
    assert [of_choice(SamplingParams(seed=5), choice).seed for choice in range(3)] == [5, 6, 7]
    assert of_choice(SamplingParams(), 2).seed is None
