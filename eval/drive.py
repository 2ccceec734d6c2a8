"""Puts a load on an engine, in this process or behind HTTP, and writes down when each token came."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import numpy as np
import psutil

from gearshift.eval.workload import Job
from gearshift.platform.engine.bridge import AsyncEngine
from gearshift.platform.request import Message, Request, SamplingParams


@dataclass(slots=True)
class Trace:
    """When a request was sent and when each piece of its answer came (seconds of one clock)."""

    asked: float
    pieces: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Tokens of each piece, as far as the server tells."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def first(self) -> float:
        return self.pieces[0] - self.asked

    def add(self, tokens: int) -> None:
        self.pieces.append(time.perf_counter())
        self.sizes.append(tokens)

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Seconds between tokens that came in a window of time. Tokens of one piece share its gap: text is held back until
        a character is whole."""
        steps = zip(itertools.pairwise(self.pieces), self.sizes[1:], strict=True)
        return [
            (later - sooner) / tokens
            for (sooner, later), tokens in steps
            if begin <= sooner and later <= end
            for _ in range(tokens)
        ]


@dataclass(frozen=True, slots=True)
class Run:
    traces: tuple[Trace, ...]
    seconds: float
    cpu_seconds: float
    peak_kv: float = 0.0
    preemptions: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(trace.output_tokens for trace in self.traces)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.output_tokens / self.cpu_seconds if self.cpu_seconds else 0.0

    def ttft(self, percentile: float) -> float:
        return float(np.percentile([trace.first for trace in self.traces], percentile))

    def itl(self, percentile: float) -> float:
        return percentile_of([gap for trace in self.traces for gap in trace.gaps()], percentile)


def percentile_of(values: Sequence[float], percentile: float) -> float:
    return float(np.percentile(values, percentile)) if values else 0.0


class Target(Protocol):
    async def ask(self, job: Job, trace: Trace) -> None:
        """Fills the trace as the answer comes. Greedy, and of exactly `job.output` tokens where the server obeys
        `ignore_eos`."""
        ...

    def cpu_seconds(self) -> float: ...


class InProcess:
    """An engine in this process: its CPU time is the whole process's, so the load generator's own is in it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.peak_blocks = 0
        self._ids = itertools.count()

    async def ask(self, job: Job, trace: Trace) -> None:
        sampling = SamplingParams(max_tokens=job.output, temperature=0.0, ignore_eos=True)
        request = Request(f"bench-{next(self._ids)}", (Message("user", job.text),), sampling, job.tenant, job.service)
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                self.peak_blocks = max(self.peak_blocks, self.engine.stats().kv_blocks_used)
                trace.add(delta.tokens)
                if delta.usage is not None:
                    trace.prompt_tokens = delta.usage.prompt_tokens
                    trace.output_tokens = delta.usage.completion_tokens
                    trace.cached_tokens = delta.usage.cached_tokens

    def cpu_seconds(self) -> float:
        return time.process_time()


class Http:
    """Any OpenAI-compatible server. Its CPU time is known only if its process is (`pid`, children included)."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, model: str, pid: int | None = None) -> None:
        self._session = session
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._model = model
        self._pid = pid

    async def ask(self, job: Job, trace: Trace) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": job.text}],
            "max_tokens": job.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{self._url} answered {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    self._take(json.loads(line[6:]), trace)

    def _take(self, chunk: dict[str, object], trace: Trace) -> None:
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and (choices[0].get("delta") or {}).get("content"):
            trace.add(1)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            trace.prompt_tokens, trace.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]

    def cpu_seconds(self) -> float:
        if self._pid is None:
            return 0.0
        process = psutil.Process(self._pid)
        return sum(sum(each.cpu_times()[:2]) for each in [process, *process.children(recursive=True)])


async def closed_loop(target: Target, jobs: Sequence[Job], streams: int) -> Run:
    """`streams` clients, each of which sends its next job when it has the answer to the last."""
    waiting = iter(jobs)

    async def client(traces: list[Trace]) -> None:
        for job in waiting:
            traces.append(Trace(time.perf_counter()))
            await target.ask(job, traces[-1])

    return await _measure(target, lambda traces: [client(traces) for _ in range(streams)])


async def open_loop(target: Target, jobs: Sequence[Job]) -> Run:
    """Each job at its own time, whether or not earlier ones are done."""
    begun = time.perf_counter()

    async def client(job: Job, traces: list[Trace]) -> None:
        await asyncio.sleep(begun + job.at - time.perf_counter())
        traces.append(Trace(time.perf_counter()))
        await target.ask(job, traces[-1])

    return await _measure(target, lambda traces: [client(job, traces) for job in jobs])


async def _measure(target: Target, clients: Callable[[list[Trace]], list[Coroutine[Any, Any, None]]]) -> Run:
    traces: list[Trace] = []
    preempted = target.engine.stats().preemptions if isinstance(target, InProcess) else 0
    cpu, begun = target.cpu_seconds(), time.perf_counter()
    await asyncio.gather(*clients(traces))
    seconds, cpu = time.perf_counter() - begun, target.cpu_seconds() - cpu
    if not isinstance(target, InProcess):
        return Run(tuple(traces), seconds, cpu)
    stats = target.engine.stats()
    peak = target.peak_blocks / stats.kv_blocks_total
    return Run(tuple(traces), seconds, cpu, peak, stats.preemptions - preempted)
