"""Questions that every tier has answered: what routers are trained, calibrated and measured on. One JSON object a line."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from contextlib import aclosing
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np

from gearshift.eval.graders import GRADERS, Kind
from gearshift.platform.config import Config
from gearshift.platform.engine.local import load_engine
from gearshift.platform.engine.protocol import Engine
from gearshift.platform.engine.upstream import UpstreamEngine
from gearshift.platform.errors import ConfigError
from gearshift.platform.prompts.assemble import assemble
from gearshift.platform.request import Delta, Message, Request, SamplingParams, Usage
from gearshift.platform.weights import source
from gearshift.platform.weights.source import Progress
from gearshift.router.answers import Attempt, Certainty
from gearshift.router.features import Query
from gearshift.router.learned import Examples
from gearshift.router.metrics import Numbers


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`split` test is never trained or calibrated on."""

    id: str
    split: str
    kind: Kind
    question: str
    answers: tuple[str, ...]


class TierAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one tier said. quality: 0 to 1; seconds: CPU of the engine; logprobs and entropies as in `Delta`."""

    quality: float
    seconds: float = 0.0
    text: str = ""
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()


class Answered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    query: str
    tiers: dict[str, TierAnswer]
    """By name, from cheap to expensive."""
    turns: int = 1
    id: str = ""
    split: str = "train"


def own_questions() -> Path:
    """Written for this: facts, sums and choices of mixed difficulty, a third of them held out."""
    return Path(str(files("gearshift.eval").joinpath("questions/live.jsonl")))


def collect(
    config: Config, questions: Sequence[Question], max_tokens: int, streams: int, progress: Progress
) -> list[Answered]:
    """Asks every tier every question, `streams` at a time as under load, with its release's prompt, greedily.

    The CPU time of a tier is shared out by the tokens that each answer and its prompt had computed.
    """
    found = [asyncio.run(_answers_of(config, tier, questions, max_tokens, streams, progress)) for tier in config.tiers]
    return [
        Answered(question.question, dict(zip(config.tiers, answers, strict=True)), id=question.id, split=question.split)
        for question, answers in zip(questions, zip(*found, strict=True), strict=True)
    ]


async def _answers_of(
    config: Config, tier: str, questions: Sequence[Question], max_tokens: int, streams: int, progress: Progress
) -> list[TierAnswer]:
    release = config.releases[config.releases_of(tier)[0]]
    engine, seats, done = _engine(config, release.model, progress), asyncio.Semaphore(streams), itertools.count(1)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, certainty=True)

    async def ask(question: Question) -> list[Delta]:
        messages = assemble(config.prompts[release.prompt], (Message("user", question.question),))
        async with seats, aclosing(engine.generate(Request(question.id, messages, sampling))) as deltas:
            pieces = [delta async for delta in deltas]
        progress(f"asking {tier}", next(done), len(questions))
        return pieces

    begun = time.process_time()
    answers = await asyncio.gather(*(ask(question) for question in questions))
    spent = time.process_time() - begun
    await engine.close()
    tokens = [_computed(pieces[-1].usage) for pieces in answers]
    each = spent / max(1, sum(tokens))
    graded = zip(questions, answers, tokens, strict=True)
    return [_graded(question, pieces, each * count) for question, pieces, count in graded]


def _computed(usage: Usage | None) -> int:
    return usage.total_tokens - usage.cached_tokens if usage else 0


def _graded(question: Question, pieces: Sequence[Delta], seconds: float) -> TierAnswer:
    text = "".join(piece.text for piece in pieces)
    return TierAnswer(
        quality=float(GRADERS[question.kind](text, question.answers)),
        seconds=seconds,
        text=text,
        logprobs=tuple(value for piece in pieces for value in piece.logprobs),
        entropies=tuple(value for piece in pieces for value in piece.entropies),
    )


def _engine(config: Config, name: str, progress: Progress) -> Engine:
    model = config.models[name]
    if model.upstream is not None:
        return UpstreamEngine(model.upstream, os.environ)
    if model.source is None:
        raise ConfigError(f"models.{name}: has no weights, so its answers teach nothing")
    return load_engine(source.ensure(source.parse(model.source), progress).path, model)


def queries(rows: Sequence[Answered], window: int | None = None) -> list[Query]:
    """With the cheapest tier's answer for a judge; of its first `window` tokens, or all."""
    return [Query(row.query, row.turns, attempt=_attempt(row, window)) for row in rows]


def _attempt(row: Answered, window: int | None) -> Attempt:
    cheap = next(iter(row.tiers.values()))
    count = len(cheap.logprobs)
    if window is None or count <= window:
        return Attempt(cheap.text, Certainty(cheap.logprobs, cheap.entropies))
    text = cheap.text[: round(len(cheap.text) * window / count)]
    return Attempt(text, Certainty(cheap.logprobs[:window], cheap.entropies[:window]), whole=False)


def tier_names(rows: Sequence[Answered]) -> tuple[str, ...]:
    """Raises `ConfigError` when rows disagree."""
    names = tuple(rows[0].tiers)
    if len(names) < 2:
        raise ConfigError(f"answers of one tier alone teach no routing; the first row has {', '.join(names)}")
    for number, row in enumerate(rows, 1):
        if tuple(row.tiers) != names:
            raise ConfigError(f"row {number} has answers of {', '.join(row.tiers)}, the first of {', '.join(names)}")
    return names


def qualities(rows: Sequence[Answered]) -> Numbers:
    """[n, tiers]"""
    return np.array([[answer.quality for answer in row.tiers.values()] for row in rows])


def seconds(rows: Sequence[Answered]) -> Numbers:
    """[n, tiers], of the engines' CPU."""
    return np.array([[answer.seconds for answer in row.tiers.values()] for row in rows])


def examples(rows: Sequence[Answered]) -> Examples:
    return Examples(queries(rows), qualities(rows))
