"""Measures an engine from the outside: the series that vLLM's dashboards expect, for every kind of engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gearshift.platform import telemetry
from gearshift.platform.request import Delta, EngineStats, Request


class EngineMeter:
    """Owns the labelled series of one engine replica."""

    def __init__(self, model: str, engine: str) -> None:
        labels = {"model_name": model, "engine": engine}
        self._labels = labels
        self._ttft = telemetry.ENGINE_TTFT.labels(**labels)
        self._inter_token = telemetry.ENGINE_INTER_TOKEN.labels(**labels)
        self._latency = telemetry.ENGINE_E2E.labels(**labels)
        self._prompt_tokens = telemetry.ENGINE_REQUEST_PROMPT_TOKENS.labels(**labels)
        self._generation_tokens = telemetry.ENGINE_REQUEST_GENERATION_TOKENS.labels(**labels)
        self._gauges = {name: gauge.labels(**labels) for name, gauge in telemetry.ENGINE_GAUGES.items()}
        self._counters = {name: counter.labels(**labels) for name, counter in telemetry.ENGINE_COUNTERS.items()}
        self._last = EngineStats()
        self.recent = telemetry.Recent()

    async def watch(self, request: Request, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Passes the deltas on unchanged."""
        begun = last = time.perf_counter()
        first = True
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.echo:
                    yield delta
                    continue
                now = time.perf_counter()
                if first:
                    self._ttft.observe(now - last)
                    self.recent.add(time.time(), now - last)
                else:
                    for _ in range(delta.tokens):
                        self._inter_token.observe((now - last) / delta.tokens)
                first, last = False, now
                if delta.finish_reason:
                    self._finish(delta, now - begun)
                yield delta

    def observe(self, stats: EngineStats) -> None:
        """Sets the gauges; moves the counters by what has been added since the last call."""
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        values = {
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": usage,
            "dispersion": stats.dispersion,
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        for name, counter in self._counters.items():
            counter.inc(getattr(stats, name) - getattr(self._last, name))
        self._last = stats

    def _finish(self, delta: Delta, seconds: float) -> None:
        self._latency.observe(seconds)
        telemetry.ENGINE_SUCCESS.labels(**self._labels, finished_reason=delta.finish_reason).inc()
        if delta.usage is not None:
            self._prompt_tokens.observe(delta.usage.prompt_tokens)
            self._generation_tokens.observe(delta.usage.completion_tokens)
