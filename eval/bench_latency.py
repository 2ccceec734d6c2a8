"""The part of `gearshift bench engine` about time between tokens: what a long prompt and batch work do to running streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gearshift.eval.bench import Bar, Report, collect
from gearshift.eval.drive import InProcess, Trace, percentile_of
from gearshift.eval.engine_lab import Lab
from gearshift.eval.workload import Job, Shape, Spread
from gearshift.platform.weights.source import Progress

if TYPE_CHECKING:
    from gearshift.eval.bench_engine import Plan

STREAMS, BATCH, LONG_PROMPT = 8, 24, 4000
BATCH_PROMPT = Spread(40, 40)
UNDER_WAY_S, WINDOW_S = 4.0, 5.0


def latency(lab: Lab, plan: Plan, report: Report, progress: Progress) -> None:
    """What a long prompt and batch work do to running streams."""
    form = plan.formats[0]
    stretches, shares, targets = [], [], []
    for repeat in range(plan.repeats):
        progress("latency", repeat, plan.repeats)
        alone, beside = asyncio.run(_long_prompt(lab, form, repeat))
        stretches.append((alone, beside))
        unloaded = asyncio.run(_streams_alone(lab, form, repeat))
        batch_alone, _ = asyncio.run(_with_batch(lab, form, repeat, 0, None))
        batch, p95 = asyncio.run(_with_batch(lab, form, repeat, STREAMS, unloaded * 1.5))
        shares.append(batch / batch_alone)
        targets.append(p95 / (unloaded * 1.5))
    report.results.append(collect(f"inter-token p99, {STREAMS} streams", "ms", [alone * 1e3 for alone, _ in stretches]))
    report.results.append(
        collect("inter-token p99, beside a 4,000-token prompt", "ms", [beside * 1e3 for _, beside in stretches])
    )
    ratio = collect("inter-token p99, with / without the prompt", "x", [beside / alone for alone, beside in stretches])
    kept = collect("inter-token p95 / target (1.5 x p95 alone), batch work beside", "x", targets)
    share = collect("batch work beside streams / alone", "x", shares)
    report.results += [ratio, kept, share]
    report.bars.append(Bar("inter-token p99 while a long prompt prefills", ratio.median, 2.5, "max"))
    report.bars.append(Bar("inter-token p95 over target_itl_ms, 1.5 x p95 alone", kept.median, 1.0, "max"))
    report.bars.append(Bar("share of its throughput that batch work keeps", share.median, 0.4, "min"))


async def _start(
    target: InProcess, lab: Lab, streams: int, seed: int
) -> tuple[list[Trace], asyncio.Future[list[None]]]:
    """Streams that will not end by themselves, once each has given a token."""
    jobs = Shape(output=Spread(3000, 3000)).jobs(streams, seed, lab.count)
    loop = asyncio.get_running_loop()
    traces = [Trace(loop.time()) for _ in jobs]
    running = asyncio.gather(*(target.ask(job, trace) for job, trace in zip(jobs, traces, strict=True)))
    while not all(len(trace.pieces) > 2 for trace in traces):
        await asyncio.sleep(0.01)
    return traces, running


async def _stop(running: asyncio.Future[list[None]]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _long_prompt(lab: Lab, form: str, seed: int) -> tuple[float, float]:
    """Inter-token p99 of the streams in seconds: alone, and while a long prompt is computed beside them."""
    async with lab.engine(form, max_num_seqs=16) as target:
        traces, running = await _start(target, lab, STREAMS, seed)
        begun = _now(traces)
        await asyncio.sleep(WINDOW_S)
        middle = _now(traces)
        shape = Shape(prompt=Spread(LONG_PROMPT, LONG_PROMPT), output=Spread(1, 1))
        await target.ask(shape.jobs(1, seed, lab.count)[0], Trace(0.0))
        ended = _now(traces)
        await _stop(running)
    alone = [gap for trace in traces for gap in trace.gaps(begun, middle)]
    beside = [gap for trace in traces for gap in trace.gaps(middle, ended)]
    return percentile_of(alone, 99), percentile_of(beside, 99)


def _now(traces: Sequence[Trace]) -> float:
    return max(trace.pieces[-1] for trace in traces if trace.pieces)


async def _streams_alone(lab: Lab, form: str, seed: int) -> float:
    """Inter-token p95 of the interactive streams with nothing beside them, in seconds."""
    async with lab.engine(form, max_num_seqs=STREAMS + BATCH) as target:
        traces, running = await _start(target, lab, STREAMS, seed)
        await asyncio.sleep(UNDER_WAY_S)  # to the lengths that they have beside batch work
        begun = _now(traces)
        await asyncio.sleep(WINDOW_S)
        await _stop(running)
    return percentile_of([gap for trace in traces for gap in trace.gaps(begun)], 95)


async def _with_batch(lab: Lab, form: str, seed: int, streams: int, target_s: float | None) -> tuple[float, float]:
    """Tokens a second of batch work, and inter-token p95 of `streams` interactive streams beside it."""
    goal = target_s * 1e3 if target_s else None
    async with lab.engine(form, max_num_seqs=STREAMS + BATCH, target_itl_ms=goal) as target:
        traces, running = await _start(target, lab, streams, seed) if streams else ([], None)
        batch = [Trace(0.0) for _ in range(BATCH)]
        texts = Shape(BATCH_PROMPT, Spread(3000, 3000)).jobs(BATCH, seed + 1000, lab.count)
        jobs = [Job(each.text, each.output, service="batch") for each in texts]
        work = asyncio.gather(*(target.ask(job, trace) for job, trace in zip(jobs, batch, strict=True)))
        while not all(trace.pieces for trace in batch):  # all prompts are computed
            await asyncio.sleep(0.02)
        begun = _now(batch)
        await asyncio.sleep(WINDOW_S)
        ended = _now(batch)
        tokens = sum(len(trace.gaps(begun, ended)) for trace in batch)
        await _stop(work)
        if running is not None:
            await _stop(running)
    gaps = [gap for trace in traces for gap in trace.gaps(begun, ended)]
    return tokens / (ended - begun), percentile_of(gaps, 95)
