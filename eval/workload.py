"""What a load consists of: how long prompts and answers are, when they come, and what they have in common."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gearshift.platform.request import Message, ServiceClass

TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend
"""
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class Spread:
    """Lengths in tokens, uniform between two numbers."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Spread:
        """`64` or `16-256`. Raises ValueError."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        spread = cls(int(found[1]), int(found[2] or found[1])) if found else cls(0, 0)
        if not 1 <= spread.low <= spread.high:
            raise ValueError(f"{text!r} is not a length: write a number of tokens, as 64, or a range, as 16-256")
        return spread

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a load. `at`: seconds after the start, for arrivals that do not wait for answers."""

    text: str
    output: int
    at: float = 0.0
    tenant: str = "bench"
    service: ServiceClass = "interactive"


Count = Callable[[str], int]
"""Tokens that a model's chat prompt takes for a user's text."""


def chat_count(encode: Callable[[tuple[Message, ...]], list[int]]) -> Count:
    return lambda text: len(encode((Message("user", text),)))


def text_of(tokens: int, rng: random.Random, count: Count, beginning: str = "") -> str:
    """Words whose chat prompt has `tokens` tokens: exactly, where the template and `beginning` leave room for it."""
    words: list[str] = []

    def text() -> str:
        return " ".join([beginning, *words] if beginning else words)

    while (missing := tokens - count(text())) > 0:
        words += rng.choices(WORDS, k=max(1, missing // 2))
    while words and count(text()) > tokens:
        words.pop()
    return text()


@dataclass(frozen=True, slots=True)
class Shape:
    """A load to be drawn: lengths, a shared beginning, and arrivals a second (None: a fixed number of streams)."""

    prompt: Spread = Spread(64, 64)
    output: Spread = Spread(128, 128)
    shared_prefix: int = 0
    rate: float | None = None

    def jobs(self, number: int, seed: int, count: Count) -> list[Job]:
        rng = random.Random(seed)
        beginning = text_of(self.shared_prefix, random.Random(0), count) if self.shared_prefix else ""
        texts = (text_of(self.prompt.draw(rng), rng, count, beginning) for _ in itertools.count())
        arrivals = self._arrivals(rng)
        return [Job(next(texts), self.output.draw(rng), next(arrivals)) for _ in range(number)]

    def _arrivals(self, rng: random.Random) -> Iterator[float]:
        """A Poisson process: independent exponential gaps."""
        now = 0.0
        while True:
            yield now
            now += rng.expovariate(self.rate) if self.rate else 0.0
