"""`gearshift bench engine`: what the engine gives for a CPU-second, how evenly, and to whom; beside its floor and peers.

Every ratio is of two things measured in the same run, one after the other, and repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import torch

from gearshift.eval.bench import Bar, Report, collect
from gearshift.eval.drive import Http, InProcess, Run, Trace, closed_loop, open_loop, percentile_of
from gearshift.eval.engine_lab import Floor, Lab
from gearshift.eval.workload import Job, Shape, Spread, text_of
from gearshift.platform.engine.kv.cache import kv_bytes_per_token
from gearshift.platform.weights.source import Progress

FLOOR_SHARE = 0.62
PEER_TOKENS_PER_CPU_SECOND = 219.0
"""onnxruntime-genai int4, SmolLM2-135M, 16 streams, one thread: the best of the CPU engines measured on this kind of machine."""
OVER_PEERS = 1.2
VS_HTTP = {1: 0.8, 16: 1.1, 32: 1.25}


@dataclass(slots=True)
class Plan:
    """What the operator asked for."""

    streams: tuple[int, ...] = (1, 16, 32)
    formats: tuple[str, ...] = ("bfloat16", "int8", "int4")
    shape: Shape = field(default_factory=Shape)
    requests: int | None = None
    """Requests of one run; None is two a stream."""
    repeats: int = 3
    vs: tuple[str, ...] = ()
    """`transformers`, or the base URL of an OpenAI-compatible server."""
    vs_model: str = "default"
    vs_pid: int | None = None


Section = Callable[[Lab, Plan, Report, Progress], None]


def bench_engine(lab: Lab, plan: Plan, sections: Sequence[str], progress: Progress) -> Report:
    report = Report("engine")
    for name in sections:
        SECTIONS[name](lab, plan, report, progress)
    return report


def throughput(lab: Lab, plan: Plan, report: Report, progress: Progress) -> None:
    """Tokens a second over formats and streams, against the bare products of the same batch."""
    floor = Floor(lab.config, torch.bfloat16)
    runs: dict[tuple[str, int], list[Run]] = {}
    floors: dict[int, list[float]] = {}
    asyncio.run(_warm_up(lab, plan))
    for repeat in range(plan.repeats):
        progress("throughput", repeat, plan.repeats)
        for streams in plan.streams:
            floors.setdefault(streams, []).append(floor.tokens_per_cpu_second(streams))
            for form in plan.formats:
                runs.setdefault((form, streams), []).append(asyncio.run(_run(lab, form, plan, streams, repeat)))
    for streams, values in floors.items():
        report.results.append(collect(f"linear floor bfloat16, {count(streams)}: output", "tokens/CPU-s", values))
    for (form, streams), measured in runs.items():
        _add_runs(report, f"{form}, {count(streams)}", measured)
    _throughput_bars(report, runs, floors)


def _throughput_bars(report: Report, runs: dict[tuple[str, int], list[Run]], floors: dict[int, list[float]]) -> None:
    speed = {key: [run.tokens_per_cpu_second for run in measured] for key, measured in runs.items()}
    for streams in (16, 32):
        if ("bfloat16", streams) in speed:
            share = _ratios(
                report, f"bfloat16 / linear floor, {count(streams)}", speed["bfloat16", streams], floors[streams]
            )
            report.bars.append(Bar(f"share of the linear floor, {count(streams)}", share, FLOOR_SHARE, "min"))
    for form in ("int8", "int4"):
        if (form, 1) in speed and ("bfloat16", 1) in speed:
            ratio = _ratios(report, f"{form} / bfloat16, 1 stream", speed[form, 1], speed["bfloat16", 1])
            if form == "int8":
                report.bars.append(Bar("int8 over bfloat16, 1 stream", ratio, 1.3, "min"))
    best = max((collect("", "", values).median for (_, streams), values in speed.items() if streams == 16), default=0.0)
    if best:
        limit = OVER_PEERS * PEER_TOKENS_PER_CPU_SECOND
        report.bars.append(Bar("best format, 16 streams, tokens/CPU-s", best, limit, "min"))


async def _warm_up(lab: Lab, plan: Plan) -> None:
    """Kernels compile and memory is touched before anything counts."""
    for form in plan.formats:
        async with lab.engine(form) as target:
            await closed_loop(target, Shape(output=Spread(8, 8)).jobs(4, -1, lab.count), 4)


async def _run(lab: Lab, form: str, plan: Plan, streams: int, repeat: int) -> Run:
    jobs = plan.shape.jobs(plan.requests or 2 * streams, repeat, lab.count)
    async with lab.engine(form, max_num_seqs=max(streams, 1), max_queued_requests=len(jobs)) as target:
        return await (open_loop(target, jobs) if plan.shape.rate else closed_loop(target, jobs, streams))


def _add_runs(report: Report, name: str, runs: Sequence[Run]) -> None:
    def add(what: str, unit: str, value: Callable[[Run], float]) -> None:
        report.results.append(collect(f"{name}: {what}", unit, [value(run) for run in runs]))

    add("output", "tokens/s", lambda run: run.tokens_per_second)
    if all(run.cpu_seconds for run in runs):
        add("output", "tokens/CPU-s", lambda run: run.tokens_per_cpu_second)
    for percentile in (50, 99):
        add(f"time to first token p{percentile}", "ms", lambda run, p=percentile: run.ttft(p) * 1e3)  # type: ignore[misc]
    for percentile in (50, 95, 99):
        add(f"inter-token p{percentile}", "ms", lambda run, p=percentile: run.itl(p) * 1e3)  # type: ignore[misc]
    if any(run.peak_kv for run in runs):
        add("peak KV", "%", lambda run: run.peak_kv * 100)
        add("preemptions", "", lambda run: run.preemptions)


def _ratios(report: Report, name: str, ours: Sequence[float], theirs: Sequence[float]) -> float:
    result = collect(name, "x", [a / b for a, b in zip(ours, theirs, strict=True)])
    report.results.append(result)
    return result.median


def count(streams: int) -> str:
    return "1 stream" if streams == 1 else f"{streams} streams"


def quality(lab: Lab, plan: Plan, report: Report, progress: Progress) -> None:
    """Perplexity of a fixed text in each format, and the bytes of a token's keys and values."""
    forms = ("float32", "bfloat16", "int8", "int4", "int8 KV")
    limits = {"int8": 1.0, "int4": 8.0, "int8 KV": 1.0}
    found = {}
    for number, form in enumerate(forms):
        progress("perplexity", number, len(forms))
        found[form] = lab.perplexity(form)
        report.results.append(collect(f"perplexity, {form}", "", [found[form]]))
    for form, limit in limits.items():
        change = (found[form] / found["bfloat16"] - 1) * 100
        report.bars.append(Bar(f"perplexity of {form} over bfloat16, %", change, limit, "max"))
    narrow, wide = (kv_bytes_per_token(lab.config, dtype) for dtype in (torch.int8, torch.bfloat16))
    report.bars.append(Bar("bytes of int8 KV over bfloat16 KV", narrow / wide, 0.55, "max"))


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


STREAMS, BATCH, LONG_PROMPT = 8, 24, 4000
BATCH_PROMPT = Spread(40, 40)
UNDER_WAY_S, WINDOW_S = 4.0, 5.0


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


def prefix(lab: Lab, plan: Plan, report: Report, progress: Progress) -> None:
    """Time to first token of a prompt whose beginning was seen before."""
    import random

    cold, warm = [], []
    for repeat in range(plan.repeats):
        progress("prefix cache", repeat, plan.repeats)
        rng = random.Random(repeat)
        beginning = text_of(1500, rng, lab.count)
        texts = [text_of(1530, rng, lab.count, beginning) for _ in range(2)]
        first, second = asyncio.run(_two_prompts(lab, plan.formats[0], texts))
        cold.append(first.first * 1e3)
        warm.append(second.first * 1e3)
    report.results += [collect("first token, 1,500-token prefix cold", "ms", cold)]
    report.results += [collect("first token, 1,500-token prefix cached", "ms", warm)]
    ratio = _ratios(report, "first token, cached / cold", warm, cold)
    report.bars.append(Bar("time to first token with a cached prefix", ratio, 0.15, "max"))


async def _two_prompts(lab: Lab, form: str, texts: Sequence[str]) -> tuple[Trace, ...]:
    async with lab.engine(form) as target:
        run = await closed_loop(target, [Job(text, 2) for text in texts], 1)
    return run.traces


def versus(lab: Lab, plan: Plan, report: Report, progress: Progress) -> None:
    """The same load on somebody else's engine."""
    for peer in plan.vs:
        if peer == "transformers":
            from gearshift.eval.peers import versus_transformers

            versus_transformers(lab, plan, report, progress)
        else:
            _versus_http(lab, plan, report, progress, peer)


def _versus_http(lab: Lab, plan: Plan, report: Report, progress: Progress, url: str) -> None:
    theirs: dict[int, list[Run]] = {}
    ours: dict[tuple[str, int], list[Run]] = {}
    asyncio.run(_warm_up(lab, plan))
    for repeat in range(plan.repeats):
        progress(f"beside {url}", repeat, plan.repeats)
        for streams in plan.streams:
            theirs.setdefault(streams, []).append(asyncio.run(_run_http(lab, plan, streams, repeat, url)))
            for form in plan.formats:
                ours.setdefault((form, streams), []).append(asyncio.run(_run(lab, form, plan, streams, repeat)))
    for streams, measured in theirs.items():
        _add_runs(report, f"{url}, {count(streams)}", measured)
        clock = "tokens_per_cpu_second" if plan.vs_pid else "tokens_per_second"
        ratios = {
            form: _ratios(
                report,
                f"{form} / {url}, {count(streams)}",
                [getattr(run, clock) for run in ours[form, streams]],
                [getattr(run, clock) for run in measured],
            )
            for form in plan.formats
        }
        if streams in VS_HTTP:
            report.bars.append(
                Bar(f"best format over {url}, {count(streams)}", max(ratios.values()), VS_HTTP[streams], "min")
            )


async def _run_http(lab: Lab, plan: Plan, streams: int, repeat: int, url: str) -> Run:
    jobs = plan.shape.jobs(plan.requests or 2 * streams, repeat, lab.count)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:
        target = Http(session, url, plan.vs_model, plan.vs_pid)
        return await (open_loop(target, jobs) if plan.shape.rate else closed_loop(target, jobs, streams))


def scheduling(lab: Lab, plan: Plan, report: Report, progress: Progress) -> None:
    """The scheduler alone, with a model that costs nothing: its price, and whom it serves."""
    from gearshift.eval.null_model import sequence_steps_per_second, spread_between_tenants
    from gearshift.platform.engine.fairness import bound

    speeds = [sequence_steps_per_second(64) for _ in range(plan.repeats)]
    cost = collect("scheduling, 64 running", "sequence-steps/CPU-s", speeds)
    report.results.append(cost)
    report.bars.append(Bar("sequence-steps a CPU-second with a null model", cost.median, 20_000, "min"))
    pool_tokens, longest = 4096, 512
    fair = [spread_between_tenants(pool_tokens, longest, seed, by_tokens=True) for seed in range(plan.repeats)]
    robin = [spread_between_tenants(pool_tokens, longest, seed, by_tokens=False) for seed in range(plan.repeats)]
    report.results += [
        collect("largest difference between two tenants, by tokens", "weighted tokens", fair),
        collect("largest difference between two tenants, request round robin", "weighted tokens", robin),
    ]
    report.bars.append(
        Bar("difference between two tenants, the VTC bound", max(fair), bound(longest, pool_tokens), "max")
    )


SECTIONS: dict[str, Section] = {
    "throughput": throughput,
    "quality": quality,
    "latency": latency,
    "prefix": prefix,
    "scheduling": scheduling,
    "versus": versus,
}
