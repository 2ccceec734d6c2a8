"""What the way to an engine costs: the same real engine driven in process, and through HTTP, gateway and replica."""

from __future__ import annotations

import statistics

import aiohttp

from gearshift.eval.bench import Bar, Report, collect
from gearshift.eval.drive import Http, InProcess, Run, Target, closed_loop
from gearshift.eval.workload import Count, Job, Shape, Spread
from gearshift.platform.engine.bridge import AsyncEngine
from gearshift.platform.weights.source import Progress

TOKENS = 64
JOBS = {32: 64, 8: 48, 1: 12}
"""By streams."""
STREAMS, FEW = 32, (1, 8)
LEAST_THROUGHPUT, MOST_TTFT_MS = 0.9, 8.0
PATHS = ("in process", "served")


async def bench_tax(
    engine: AsyncEngine, count: Count, url: str, model: str, repeats: int, report: Report, progress: Progress
) -> None:
    """Both in turn, in another order each time. Prompts are new ones, so that nothing is cached."""
    runs: dict[tuple[str, int], list[Run]] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=STREAMS)) as session:
        targets: dict[str, Target] = dict(zip(PATHS, (InProcess(engine), Http(session, url, model)), strict=True))
        for repeat in range(-1, repeats):  # the first one warms up
            progress("measuring", max(0, repeat), repeats)
            for place, path in enumerate(PATHS if repeat % 2 else reversed(PATHS)):
                for streams in (STREAMS, *FEW):
                    run = await closed_loop(targets[path], _jobs(streams, 2 * repeat + place, count), streams)
                    if repeat >= 0:
                        runs.setdefault((path, streams), []).append(run)
    progress("measuring", repeats, repeats)
    _tell(runs, report)


def _jobs(streams: int, seed: int, count: Count) -> list[Job]:
    return Shape(Spread(64, 64), Spread(TOKENS, TOKENS)).jobs(JOBS[streams], 1000 * streams + seed, count)


def _tell(runs: dict[tuple[str, int], list[Run]], report: Report) -> None:
    for path in PATHS:
        rates = [run.tokens_per_second for run in runs[path, STREAMS]]
        report.results.append(collect(f"{path}, {STREAMS} streams", "tokens/s", rates))
    ratios = [
        served.tokens_per_second / bare.tokens_per_second
        for bare, served in zip(*(runs[path, STREAMS] for path in PATHS), strict=True)
    ]
    report.results.append(collect(f"served over in process, {STREAMS} streams", "", ratios))
    report.bars.append(Bar(f"throughput kept, {STREAMS} streams", statistics.median(ratios), LEAST_THROUGHPUT, "min"))
    for streams in FEW:
        label = "1 stream" if streams == 1 else f"{streams} streams"
        times = {path: [run.ttft(50) * 1e3 for run in runs[path, streams]] for path in PATHS}
        for path, values in times.items():
            report.results.append(collect(f"{path}, {label}", "ms to first token, p50", values))
        added = [served - bare for bare, served in zip(*times.values(), strict=True)]
        report.results.append(collect(f"added, {label}", "ms to first token, p50", added))
        report.bars.append(Bar(f"ms added to first token, {label}", statistics.median(added), MOST_TTFT_MS, "max"))
