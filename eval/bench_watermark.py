"""`gearshift bench watermark`: how surely an answer is known again, how seldom anything else is, and what the mark costs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gearshift.eval.bench import Report, collect
from gearshift.eval.engine_lab import Lab
from gearshift.eval.workload import WORDS
from gearshift.platform.engine.protocol import Engine
from gearshift.platform.engine.watermark import detect
from gearshift.platform.request import Message, Request, SamplingParams, Watermark

STRENGTHS = (1.0, 2.0, 3.0)
LENGTHS = (50, 100, 200)
KEY = 2**61 + 15
SURE = 4.0
FORM = "int8"


@dataclass(frozen=True, slots=True)
class Written:
    """Answers as tokens. loss: -log p of a token under the model as it is, in nats. rate: tokens a second."""

    answers: list[list[int]]
    loss: float
    rate: float


async def bench_watermark(lab: Lab, answers: int, report: Report, progress: Callable[[str, int, int], None]) -> None:
    """The same questions with each strength, and without; sampled at temperature 1."""
    plain = await _write(lab, answers, None)
    vocab = int(lab.config.vocab_size)
    report.results.append(collect("without a mark: loss", "nats", [plain.loss]))
    for done, strength in enumerate(STRENGTHS):
        progress("writing", done, len(STRENGTHS))
        mark = Watermark(KEY, strength)
        ours = await _write(lab, answers, mark)
        for length in LENGTHS:
            label = f"strength {strength:g}, {length} tokens"
            _tell(f"{label}: found", ours.answers, mark, length, vocab, report)
            _tell(f"{label}: others taken for it", plain.answers, mark, length, vocab, report)
        name = f"strength {strength:g}"
        report.results.append(collect(f"{name}: perplexity over none", "", [math.exp(ours.loss - plain.loss)]))
        report.results.append(collect(f"{name}: tokens/s over none", "", [ours.rate / plain.rate]))
    progress("writing", len(STRENGTHS), len(STRENGTHS))


def _tell(name: str, texts: Sequence[Sequence[int]], mark: Watermark, length: int, vocab: int, report: Report) -> None:
    long = [text[:length] for text in texts if len(text) >= length]
    found = sum(detect(text, mark, vocab).z >= SURE for text in long)
    report.results.append(collect(f"{name}, of {len(long)}", "%", [100 * found / max(1, len(long))]))


async def _write(lab: Lab, count: int, mark: Watermark | None) -> Written:
    async with lab.engine(FORM, max_num_seqs=count) as driven:
        begun = time.perf_counter()
        answers = await asyncio.gather(*(_answer(driven.engine, number, mark) for number in range(count)))
        rate = sum(map(len, answers)) / (time.perf_counter() - begun)
    # the engine, which has blocks of its own, is gone
    blocks = list(range(-(-(max(LENGTHS) + 1) // lab.settings.block_size)))
    losses = [loss for answer in answers for loss in lab.loaded(FORM).runner.losses(answer, blocks, max(LENGTHS))]
    return Written(list(answers), sum(losses) / len(losses), rate)


async def _answer(engine: Engine, number: int, mark: Watermark | None) -> list[int]:
    question = Message("user", f"Tell a long story about a {WORDS[number % len(WORDS)]}.")
    sampling = SamplingParams(max(LENGTHS), temperature=1.0, seed=number, watermark=mark, ignore_eos=True)
    request = Request(f"w{number}-{mark and mark.strength}", (question,), sampling)
    found: list[int] = []
    async with aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            found += delta.ids
    return found
