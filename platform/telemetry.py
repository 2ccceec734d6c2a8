"""What happened: one record a request, from which the metrics, the trace and the log line are all made.

Names follow vLLM (engine series), OpenTelemetry GenAI semantic conventions v0.1.0 (status "development": the names are
kept in this module alone), and `gearshift_*` for what is ours.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter, Gauge, Histogram

from gearshift.platform.config import Telemetry
from gearshift.platform.request import SamplingParams, Usage
from gearshift.platform.samples import Exposure

if _shared := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):  # by the processes of a node; the first one makes it
    Path(_shared).mkdir(parents=True, exist_ok=True)

# Buckets in seconds, as the conventions advise.
DURATION_BUCKETS = [0.01 * 2**n for n in range(14)]
TTFT_BUCKETS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
PER_TOKEN_BUCKETS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
OVERHEAD_BUCKETS = [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512]
TOKEN_BUCKETS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]

_ENGINE = ["model_name", "engine"]
ENGINE_GAUGES = {
    "running": Gauge("vllm:num_requests_running", "Requests in the batch", _ENGINE, multiprocess_mode="livesum"),
    "waiting": Gauge("vllm:num_requests_waiting", "Requests in the queue", _ENGINE, multiprocess_mode="livesum"),
    "kv_usage": Gauge(
        "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", _ENGINE, multiprocess_mode="livesum"
    ),
    "dispersion": Gauge(
        "gearshift_tenant_service_dispersion",
        "Weighted tokens between the most and the least served of the tenants that wait",
        _ENGINE,
        multiprocess_mode="livemax",
    ),
}
ENGINE_COUNTERS = {
    "preemptions": Counter("vllm:num_preemptions", "Sequences preempted", _ENGINE),
    "prompt_tokens": Counter("vllm:prompt_tokens", "Prompt tokens taken in", _ENGINE),
    "generation_tokens": Counter("vllm:generation_tokens", "Tokens generated", _ENGINE),
    "prefix_queries": Counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", _ENGINE),
    "prefix_hits": Counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", _ENGINE),
}
ENGINE_SUCCESS = Counter("vllm:request_success", "Requests finished", [*_ENGINE, "finished_reason"])
ENGINE_TTFT = Histogram("vllm:time_to_first_token_seconds", "Seconds to the first token", _ENGINE, buckets=TTFT_BUCKETS)
ENGINE_INTER_TOKEN = Histogram(
    "vllm:inter_token_latency_seconds", "Seconds between tokens", _ENGINE, buckets=PER_TOKEN_BUCKETS
)
ENGINE_E2E = Histogram("vllm:e2e_request_latency_seconds", "Seconds in the engine", _ENGINE, buckets=DURATION_BUCKETS)
ENGINE_REQUEST_PROMPT_TOKENS = Histogram(
    "vllm:request_prompt_tokens", "Prompt tokens of a request", _ENGINE, buckets=TOKEN_BUCKETS
)
ENGINE_REQUEST_GENERATION_TOKENS = Histogram(
    "vllm:request_generation_tokens", "Generated tokens of a request", _ENGINE, buckets=TOKEN_BUCKETS
)

_GEN_AI = ["gen_ai_operation_name", "gen_ai_request_model"]
SERVER_DURATION = Histogram(
    "gen_ai_server_request_duration_seconds", "Seconds from request to end of answer", _GEN_AI, buckets=DURATION_BUCKETS
)
SERVER_TTFT = Histogram(
    "gen_ai_server_time_to_first_token_seconds", "Seconds to the first token sent", _GEN_AI, buckets=TTFT_BUCKETS
)
SERVER_PER_TOKEN = Histogram(
    "gen_ai_server_time_per_output_token_seconds", "Seconds a token after the first", _GEN_AI, buckets=PER_TOKEN_BUCKETS
)

REQUESTS = Counter("gearshift_requests", "Requests ended", ["tenant", "tier", "release", "status"])
TOKENS = Counter("gearshift_tokens", "Tokens of answers from engines", ["tenant", "release", "kind"])
COST = Counter("gearshift_cost_dollars", "Price of the tokens", ["tenant", "tier"])
PROMPT_CACHE = Counter("gearshift_prompt_cache_blocks", "KV blocks that travelled", ["model", "result"])
CACHE = Counter("gearshift_cache", "Answers looked up", ["kind", "result"])
CACHE_LOOKUPS = Counter("gearshift_cache_lookups", "Answers looked up", ["tenant", "release", "result"])
SAVED_TOKENS = Counter(
    "gearshift_cache_saved_tokens", "Tokens of answers that were not generated anew", ["tenant", "release", "result"]
)
SAVED_COST = Counter("gearshift_cache_saved_dollars", "Their price", ["tenant", "release", "result"])
CASCADE = Counter("gearshift_cascade", "Answers of the cheap tier judged before they were sent", ["tier", "result"])
SCORES = Histogram(
    "gearshift_route_score", "Estimated gain of the expensive tier", ["tenant"], buckets=[n / 20 for n in range(-4, 21)]
)
ROUTER_DRIFT = Gauge(
    "gearshift_router_drift",
    "Population stability index of the tenant's scores against those the router was calibrated on",
    ["tenant"],
    multiprocess_mode="livemax",
)
ROUTES = Counter("gearshift_routes", "Routing decisions", ["tier", "reason"])
VERDICTS = Counter("gearshift_guardrail_verdicts", "Guardrail verdicts other than allow", ["stage", "action", "rule"])
FALLBACKS = Counter("gearshift_fallbacks", "Requests moved to another tier", ["from_tier", "to_tier"])
OVERHEAD = Histogram(
    "gearshift_overhead_seconds", "Seconds a request spent outside the engine", buckets=OVERHEAD_BUCKETS
)
INFLIGHT = Gauge("gearshift_inflight_requests", "Requests being worked on", multiprocess_mode="livesum")
SAMPLES_LOST = Counter("gearshift_samples_lost", "Finished requests that the evaluator never heard of")
SCORED = Counter("gearshift_samples_scored", "Finished requests that the evaluator has taken in", ["release"])
EXPERIMENT_VALUE = Gauge(
    "gearshift_experiment_value", "What an arm measures", ["experiment", "arm", "measure"], multiprocess_mode="livemax"
)
EXPERIMENT_EXPOSURES = Gauge(
    "gearshift_experiment_exposures", "Requests of this period", ["experiment", "arm"], multiprocess_mode="livemax"
)
EXPERIMENT_MISMATCH = Gauge(
    "gearshift_experiment_sample_ratio_mismatch",
    "1 when the arms did not get their shares",
    ["experiment"],
    multiprocess_mode="livemax",
)
EXPERIMENT_ALERT = Gauge(
    "gearshift_experiment_alert", "1 while a guard is surely worse", ["experiment", "arm"], multiprocess_mode="livemax"
)
RELEASE_DRIFT = Gauge(
    "gearshift_release_drift",
    "1 when the measure was worse in the release's last requests than in those before",
    ["release", "measure"],
    multiprocess_mode="livemax",
)
RESUMED = Counter("gearshift_resumed_streams", "Answers that went on at another replica", ["model"])
SHADOWS = Counter("gearshift_shadow_requests", "Requests sent to arms in the shadow", ["experiment", "arm", "result"])
JUDGED = Counter("gearshift_judged_pairs", "Pairs of answers given to the judge", ["result"])
JUDGE_COST = Counter("gearshift_judge_cost_dollars", "Price of the judge's tokens")
CANARY = Gauge(
    "gearshift_canary_score",
    "Share of the fixed questions a release answered well",
    ["release"],
    multiprocess_mode="livemax",
)
WEBHOOKS = Counter("gearshift_webhooks", "Changes told to webhooks", ["result"])
ROLLBACKS = Counter("gearshift_rollbacks", "Arms that were rolled back by the evaluator", ["experiment", "arm"])
ABANDONED = Counter("gearshift_abandoned_requests", "Requests whose client went away")


class StepTime(NamedTuple):
    """A step of the pipeline; nanoseconds since the epoch."""

    name: str
    start_ns: int
    end_ns: int


class VerdictNote(NamedTuple):
    stage: str
    action: str
    rule: str


class AttemptNote(NamedTuple):
    """An answer of a tier that was given up."""

    tier: str
    reason: str
    confidence: float
    prompt_tokens: int
    completion_tokens: int
    cost_dollars: float


@dataclass(slots=True)
class Record:
    """All that is known about one request. The pipeline owns it and fills it in; afterwards it is emitted once."""

    request_id: str
    operation: str = "chat"
    started_ns: int = field(default_factory=time.time_ns)
    tenant: str = ""
    asked: str = ""
    sampling: SamplingParams | None = None
    prompt: tuple[str, int] | None = None
    """Name and version of the prompt."""
    tier: str = ""
    release: str = ""
    exposure: Exposure | None = None
    """The arm of an experiment that chose the release."""
    routed_by: Exposure | None = None
    """The arm that chose the router's threshold."""
    epoch: int = 0
    route_reason: str = ""
    score: float | None = None
    threshold: float | None = None
    """That the score was held against."""
    scorer: str = ""
    query: str = ""
    """The last user message, only when the config says so."""
    attempts: list[AttemptNote] = field(default_factory=list)
    """Answers that were given up before the client saw any of them."""
    accepted: bool = False
    """The answer was judged, and found good enough."""
    cache: str = "bypass"
    """Or hit, miss; semantic: of a question that asks the same; shared: with a request that was answered at the same time."""
    stream: bool = False
    verdicts: list[VerdictNote] = field(default_factory=list)
    ticket: str = ""
    """Of a human's review, for which the question or the answer waits, or waited."""
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    usage: Usage | None = None
    cost_dollars: float = 0.0
    saved_dollars: float = 0.0
    """What it would have cost without the cache."""
    finish_reason: str = ""
    status: int = 0
    error: str = ""
    first_token_ns: int = 0
    ended_ns: int = 0
    engine_ns: int = 0
    engine_deltas: int = 0
    steps: list[StepTime] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.time_ns()
        try:
            yield
        finally:
            self.steps.append(StepTime(name, start, time.time_ns()))

    def looked_up(self, begun_ns: int, found: str) -> None:
        """The cache was asked. An answer that another request got meanwhile was waited for like an engine's."""
        self.cache, now = found, time.time_ns()
        self.steps.append(StepTime("cache", begun_ns, now))
        if found == "shared":
            self.engine_ns += now - begun_ns

    @property
    def replayed(self) -> bool:
        """It was generated for another request."""
        return self.cache in ("hit", "semantic", "shared")

    @property
    def overhead_ms(self) -> float:
        """Everything so far that was not waiting for the engine."""
        return ((self.ended_ns or time.time_ns()) - self.started_ns - self.engine_ns) / 1e6


class FileSpanExporter(SpanExporter):
    """One span a line, as JSON."""

    def __init__(self, path: str) -> None:
        self._out = Path(path).open("a")  # noqa: SIM115 -- open as long as the process

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            self._out.write(span.to_json(indent=None) + "\n")
        self._out.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._out.close()


def _exporter(config: Telemetry) -> SpanExporter | None:
    if config.traces == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=config.otlp_endpoint)
    if config.traces == "file":
        return FileSpanExporter(config.traces_path)
    return ConsoleSpanExporter() if config.traces == "console" else None


class Recent:
    """Times to first token of the last minute, as far as a bounded number holds them."""

    SECONDS, MOST = 60.0, 2000

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=self.MOST)

    def add(self, at: float, seconds: float) -> None:
        self._seen.append((at, seconds))

    def told(self, now: float) -> tuple[float, float, float, int]:
        """p50, p95, p99 (nearest rank) and how many."""
        while self._seen and self._seen[0][0] < now - self.SECONDS:
            self._seen.popleft()
        values = sorted(seconds for _, seconds in self._seen)
        if not values:
            return 0.0, 0.0, 0.0, 0
        p50, p95, p99 = (values[math.ceil(share * len(values)) - 1] for share in (0.5, 0.95, 0.99))
        return p50, p95, p99, len(values)


class Emitter:
    """Owns the ways out: exporter, log of records, metrics."""

    def __init__(self, config: Telemetry) -> None:
        self._provider: TracerProvider | None = None
        self._tracer: trace.Tracer = trace.NoOpTracer()
        exporter = _exporter(config)
        if exporter is not None:
            self._provider = TracerProvider(
                resource=Resource.create({"service.name": "gearshift"}),
                sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            )
            self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
            self._tracer = self._provider.get_tracer("gearshift")
        self._propagator = TraceContextTextMapPropagator()
        self.recent = Recent()
        self._records: IO[str] | None = None
        if config.records == "file":
            self._records = Path(config.records_path).open("a")  # noqa: SIM115 -- open as long as the process
        elif config.records == "stdout":
            self._records = sys.stdout

    def begin(self, record: Record, headers: dict[str, str]) -> Span:
        """The request's span; continues the caller's trace when it sent a `traceparent`."""
        if self._provider is None:
            return trace.INVALID_SPAN
        context = self._propagator.extract(headers)
        return self._tracer.start_span(
            record.operation, context=context, kind=SpanKind.SERVER, start_time=record.started_ns
        )

    def propagate(self, span: Span) -> dict[str, str]:
        """Headers that continue the trace elsewhere."""
        carrier: dict[str, str] = {}
        if span.is_recording():
            self._propagator.inject(carrier, trace.set_span_in_context(span))
        return carrier

    def emit(self, record: Record, span: Span) -> None:
        record.ended_ns = time.time_ns()
        if record.first_token_ns and record.status == 200:
            self.recent.add(record.ended_ns / 1e9, (record.first_token_ns - record.started_ns) / 1e9)
        _count(record)
        if span.is_recording():
            self._trace(record, span)
        if self._records is not None:
            self._records.write(msgspec.json.encode(record).decode() + "\n")
            self._records.flush()

    def evaluated(self, request_id: str, traceparent: str, scores: Mapping[str, tuple[float | None, str]]) -> None:
        """Scores of an answer, each as an event `gen_ai.evaluation.result` of a span in the request's own trace."""
        if self._provider is None:
            return
        context = self._propagator.extract({"traceparent": traceparent})
        with self._tracer.start_as_current_span("evaluate", context=context) as span:
            span.set_attribute("gen_ai.response.id", request_id)
            for name, (value, label) in scores.items():
                if value is None:
                    continue
                event: dict[str, str | float] = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value}
                span.add_event(
                    "gen_ai.evaluation.result", event | ({"gen_ai.evaluation.score.label": label} if label else {})
                )

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()

    def _trace(self, record: Record, span: Span) -> None:
        span.update_name(f"{record.operation} {record.asked}")
        span.set_attributes({name: value for name, value in _attributes(record).items() if value not in (None, "")})
        for note in record.verdicts:
            span.add_event("gearshift.guardrail.verdict", note._asdict())
        parent = trace.set_span_in_context(span)
        for step in record.steps:
            child = self._tracer.start_span(step.name, context=parent, start_time=step.start_ns)
            child.end(step.end_ns)
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(record.ended_ns)


def _attributes(record: Record) -> dict[str, Any]:
    usage, first, sampling = record.usage, record.first_token_ns, record.sampling
    prompt_name, prompt_version = record.prompt or (None, None)
    asked = (
        {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k or None,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.stop_sequences": sampling.stop or None,
        }
        if sampling
        else {}
    )
    return asked | {
        "gen_ai.prompt.name": prompt_name,
        "gen_ai.prompt.version": str(prompt_version) if prompt_version else None,
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "gearshift",
        "gen_ai.request.model": record.asked,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": record.release,
        "gen_ai.response.finish_reasons": [record.finish_reason] if record.finish_reason else None,
        "gen_ai.response.time_to_first_chunk": (first - record.started_ns) / 1e9 if first else None,
        "gen_ai.usage.input_tokens": usage.prompt_tokens if usage else None,
        "gen_ai.usage.output_tokens": usage.completion_tokens if usage else None,
        "error.type": record.error,
        "http.response.status_code": record.status,
        "gearshift.tenant": record.tenant,
        "gearshift.tier": record.tier,
        "gearshift.route_reason": record.route_reason,
        "gearshift.cache": record.cache,
        "gearshift.overhead_ms": record.overhead_ms,
    }


def _count(record: Record) -> None:
    REQUESTS.labels(record.tenant, record.tier, record.release, str(record.status)).inc()
    if not record.release:  # refused before it was known what it asks for: `asked` is any text a client sent
        return
    OVERHEAD.observe(record.overhead_ms / 1e3)
    operation = (record.operation, record.tier)
    SERVER_DURATION.labels(*operation).observe((record.ended_ns - record.started_ns) / 1e9)
    if record.first_token_ns:
        SERVER_TTFT.labels(*operation).observe((record.first_token_ns - record.started_ns) / 1e9)
    if not record.replayed and record.usage is not None:
        usage = record.usage
        TOKENS.labels(record.tenant, record.release, "prompt").inc(usage.prompt_tokens)
        TOKENS.labels(record.tenant, record.release, "completion").inc(usage.completion_tokens)
        COST.labels(record.tenant, record.tier).inc(record.cost_dollars)
        if record.first_token_ns and usage.completion_tokens > 1:
            seconds = (record.ended_ns - record.first_token_ns) / 1e9
            SERVER_PER_TOKEN.labels(*operation).observe(seconds / (usage.completion_tokens - 1))
    CACHE.labels("exact", record.cache).inc()
    if record.cache != "bypass":
        CACHE_LOOKUPS.labels(record.tenant, record.release, record.cache).inc()
    if record.replayed and record.usage is not None:
        saved = record.tenant, record.release, record.cache
        SAVED_TOKENS.labels(*saved).inc(record.usage.total_tokens)
        SAVED_COST.labels(*saved).inc(record.saved_dollars)
    ROUTES.labels(record.tier, record.route_reason.partition(":")[0]).inc()
    if record.score is not None:
        SCORES.labels(record.tenant).observe(record.score)
    for attempt in record.attempts:
        CASCADE.labels(attempt.tier, "given up").inc()
        COST.labels(record.tenant, attempt.tier).inc(attempt.cost_dollars)
    if record.accepted:
        CASCADE.labels(record.tier, "accepted").inc()
    for note in record.verdicts:
        VERDICTS.labels(*note).inc()
    for from_tier, to_tier in record.fallbacks:
        FALLBACKS.labels(from_tier, to_tier).inc()
