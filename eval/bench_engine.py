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
from gearshift.eval.bench_latency import latency
from gearshift.eval.drive import Http, Run, Trace, closed_loop, open_loop
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
