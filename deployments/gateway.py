"""The HTTP API: owns the connection, and nothing of what is decided about a request."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from opentelemetry.trace import INVALID_SPAN
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gearshift import __version__
from gearshift.deployments.call import CacheUse, Call, Ticket
from gearshift.deployments.exposition import metrics_page
from gearshift.deployments.feedback import parse_feedback
from gearshift.deployments.moderations import parse_moderation
from gearshift.deployments.pipeline import Pipeline, without_text
from gearshift.deployments.samples import Heard, SampleLog
from gearshift.deployments.shadow import Shadows
from gearshift.platform import completions, telemetry
from gearshift.platform.cache.store import StoreAway
from gearshift.platform.completions import parse_completions
from gearshift.platform.config import Gateway
from gearshift.platform.errors import (
    DeadlineExceeded,
    GearshiftError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    RequestTooLarge,
    StoreUnavailable,
    public,
)
from gearshift.platform.openai import (
    ChunkWriter,
    Generation,
    Identity,
    completion,
    error_event,
    model_object,
    parse_chat,
)
from gearshift.platform.request import Delta
from gearshift.platform.telemetry import Emitter, Record
from gearshift.platform.tenants import require_token

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""nginx's status for a client that went away; only ever seen in records."""
HEARTBEAT_S = 1.0
"""Between two comments to a client whose model is being started."""
WATCH_S = 0.05
"""From when on it is looked whether a client has gone away."""
PROMPTS_AT_ONCE = 8
"""Of one request, so that it does not take all seats."""


def create_app(
    serving: Callable[[], Pipeline],
    config: Gateway,
    emitter: Emitter,
    ready: Callable[[], str | None],
    samples: SampleLog,
    shadows: Shadows,
    metrics_token: str | None = None,
) -> ASGIApp:
    """`serving`: the pipeline of the present revision; a request keeps the one that it began with. `ready` says what is still
    missing, or None."""
    app = FastAPI(title="Gearshift", version=__version__, docs_url=None, redoc_url=None)
    created = int(time.time())

    class Generate:
        """The hot routes, as plain ASGI: FastAPI's argument machinery has nothing to do for them."""

        def __init__(self, dialect: Dialect) -> None:
            self._dialect = dialect

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            exchange = Exchange(self._dialect, request, serving(), config, emitter, samples, shadows)
            await exchange.respond(receive, send)

    hot = {"/v1/chat/completions": Generate(CHAT), "/v1/completions": Generate(TEXT)}
    for path, generate in hot.items():  # known to the rest of the app too, which answers other methods
        app.router.routes.append(Route(path, generate, methods=["POST"]))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        names = serving().models_for(request.headers.get("authorization", ""))
        return JSONResponse({"object": "list", "data": [model_object(name, created) for name in names]})

    @app.get("/v1/models/{name}")
    async def model(name: str, request: Request) -> Response:
        if name not in serving().models_for(request.headers.get("authorization", "")):
            raise ModelNotFound(f"There is no model {name!r}.", param="model")
        return JSONResponse(model_object(name, created))

    @app.post("/v1/feedback")
    async def feedback(request: Request) -> Response:
        caller = await serving().admit(request.headers.get("authorization", ""))
        if not samples.enabled:
            raise InvalidRequest("Feedback is not taken here: this deployment runs without an evaluator.")
        given = parse_feedback(await read_body(request, config.max_body_bytes))
        try:
            counted = await samples.feedback(given.feedback(caller.tenant))
        except StoreAway as error:
            raise StoreUnavailable("Feedback can't be taken just now; send it again.", retry_after_s=1.0) from error
        return JSONResponse({"object": "feedback", "request_id": given.request_id, "counted": counted})

    @app.post("/v1/moderations")
    async def moderations(request: Request) -> Response:
        asked = parse_moderation(await read_body(request, config.max_body_bytes))
        return JSONResponse(await serving().moderate(request.headers.get("authorization", ""), asked))

    @app.get("/v1/reviews/{ticket}")
    async def review(ticket: str, request: Request) -> Response:
        return JSONResponse(await serving().review(request.headers.get("authorization", ""), ticket))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    @app.get("/ready")
    async def readiness() -> Response:
        missing = "draining" if serving().draining else ready()
        if missing is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": missing}, status_code=503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        require_token(metrics_token, request.headers.get("authorization", ""))
        body, content_type = await asyncio.to_thread(metrics_page)
        return Response(body, media_type=content_type)

    app.add_exception_handler(GearshiftError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        """The hot routes answer all errors themselves, and need nothing that is around the others."""
        generate = hot.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (generate or app)(scope, receive, send)

    return serve


async def read_body(request: Request, limit: int) -> bytes:
    """Raises `RequestTooLarge`, `InvalidRequest`."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise RequestTooLarge(f"The body is larger than {limit} bytes.")
    except ClientDisconnect as error:
        raise InvalidRequest("The body ended early.") from error
    return bytes(body)


async def _on_error(request: Request, error: Exception) -> Response:
    """Errors outside of a chat exchange, in the same form."""
    shown: GearshiftError
    if isinstance(error, HTTPException):
        kinds = {404: NotFound, 405: MethodNotAllowed}
        kind = kinds.get(error.status_code, InvalidRequest)
        shown = kind(f"{request.method} {request.url.path}: {error.detail}.")
    else:
        shown = public(error)
        if shown.status >= 500:
            log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(shown.body(), shown.status, headers=error_headers(shown) | {"x-request-id": _new_id()})


def _new_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def error_headers(error: GearshiftError) -> dict[str, str]:
    """When to come again, and whether to."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    if error.status in (409, 429) or error.status >= 500:
        headers["x-should-retry"] = str(error.retryable).lower()
    return headers


@dataclass(frozen=True, slots=True)
class Dialect:
    """One of the API's ways to ask for text. parse: the body to what it asks for, several prompts to several. whole: their
    answers to a body. writer: for the events of a stream."""

    operation: str
    prefix: str
    parse: Callable[[bytes], Sequence[Generation]]
    whole: Callable[[Identity, Sequence[Any], Sequence[Sequence[Delta]]], bytes]
    writer: Callable[[Identity, Any], Writer]


class Writer(Protocol):
    DONE: ClassVar[bytes]

    def events(self, delta: Delta) -> bytes: ...


CHAT = Dialect(
    "chat",
    "chatcmpl-",
    lambda body: [parse_chat(body)],
    lambda identity, _, answers: completion(identity, answers[0]),
    lambda identity, body: ChunkWriter(identity, body.include_usage, body.choices),
)
TEXT = Dialect("text_completion", "cmpl-", parse_completions, completions.completion, completions.CompletionWriter)


class Exchange:
    """One request and its answer, from its first byte to its last.

    All of it runs in one task, the server's, which is cancelled when the client goes away or the deadline passes: closing
    the pipeline's generator is the one mechanism that stops what is below. The status line waits for the first Delta, so
    that an early failure has a real status. A body with several prompts is as many requests, with a record each.
    """

    def __init__(
        self,
        dialect: Dialect,
        request: Request,
        pipeline: Pipeline,
        config: Gateway,
        emitter: Emitter,
        samples: SampleLog,
        shadows: Shadows,
    ) -> None:
        self._dialect = dialect
        self._request = request
        self._pipeline = pipeline
        self._config = config
        self._emitter = emitter
        self._samples = samples
        self._shadows = shadows
        self._calls: list[Call] = []
        self._tickets = [self._ticket_for(_new_id())]
        self._record = self._tickets[0].record
        self._begun = False

    def _ticket_for(self, request_id: str) -> Ticket:
        return Ticket(Record(request_id, self._dialect.operation), Heard(self._samples.wants_text))

    async def respond(self, receive: Receive, send: Send) -> None:
        body = await self._read_body()  # before anybody else may call receive
        me = asyncio.current_task()
        assert me is not None
        watch = Watch(receive, me)
        try:
            await self._work(body, send)
        except asyncio.CancelledError:
            telemetry.ABANDONED.inc()
            if not watch.gone or me.uncancel():  # somebody else ends this task
                raise
        finally:
            watch.end()

    async def _read_body(self) -> bytes | GearshiftError:
        try:
            return await read_body(self._request, self._config.max_body_bytes)
        except GearshiftError as error:
            return error

    async def _work(self, body: bytes | GearshiftError, send: Send) -> None:
        record = self._record
        headers = self._request.headers
        span = self._emitter.begin(record, {"traceparent": headers.get("traceparent", "")})
        try:
            if isinstance(body, GearshiftError):
                raise body
            async with asyncio.timeout(self._config.request_timeout_s):
                asked, trace = self._dialect.parse(body), self._emitter.propagate(span)
                self._calls = [self._call(each, hash((place, body)), trace) for place, each in enumerate(asked)]
                await self._answer(send)
        except asyncio.CancelledError:
            record.status, record.error = CLIENT_GONE, "client_gone"
            raise
        except TimeoutError:
            seconds = self._config.request_timeout_s
            await self._fail(DeadlineExceeded(f"The answer was not finished within {seconds:g} seconds."), send)
        except Exception as error:
            await self._fail(error, send)
        finally:
            self._emitter.emit(record, span)
            for ticket in self._tickets[1:]:
                ticket.record.status, ticket.record.error = record.status, record.error
                self._emitter.emit(ticket.record, INVALID_SPAN)
            for place, ticket in enumerate(self._tickets):
                self._samples.told(ticket.record, ticket.heard)
                if self._calls:
                    self._shadows.offer(self._pipeline, self._calls[place], ticket)

    def _call(self, asked: Generation, came: int, trace: dict[str, str]) -> Call:
        headers = self._request.headers
        authorization = headers.get("authorization", "")
        return Call(
            id=self._record.request_id,
            body=asked,
            authorization=authorization,
            use=_cache_use(headers.get("cache-control", "")),
            tier=headers.get("x-gearshift-tier", ""),
            trace=trace,
            came=hash((came, authorization)),
        )

    async def _answer(self, send: Send) -> None:
        for place, call in enumerate(self._calls[1:], 1):
            ticket = self._ticket_for(f"{call.id}-{place}")
            self._calls[place] = replace(call, id=ticket.record.request_id)
            self._tickets.append(ticket)
        if len(self._calls) > 1:
            await self._answer_all(send)
            return
        [call], [ticket] = self._calls, self._tickets
        self._record.stream = bool(call.body.stream)
        async with aclosing(self._pipeline.run(call, ticket)) as deltas:
            may_wait = call.body.stream and self._pipeline.stage()
            first = await (self._held(deltas, send) if may_wait else anext(deltas))
            self._record.first_token_ns = time.time_ns()
            if call.body.stream:
                writer = self._dialect.writer(self._identity(), call.body)
                await self._stream(writer, first, deltas, send)
            else:
                await self._whole([[first, *[delta async for delta in deltas]]], send)

    async def _held(self, deltas: AsyncGenerator[Delta, None], send: Send) -> Delta:
        """The first Delta; while its model is started, comments keep the connection alive, and the status line can't wait."""
        first = asyncio.ensure_future(anext(deltas))
        try:
            while not (await asyncio.wait({first}, timeout=HEARTBEAT_S))[0]:
                release = self._record.release
                if release and (stage := self._pipeline.stage(release)):
                    await self._begin_stream(send)
                    await _body(send, f": {stage}\n\n".encode(), more=True)
            return first.result()
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _answer_all(self, send: Send) -> None:
        """Several prompts, a few at a time; one that fails fails them all."""
        gate = asyncio.Semaphore(PROMPTS_AT_ONCE)

        async def answer(call: Call, ticket: Ticket) -> list[Delta]:
            async with gate, aclosing(self._pipeline.run(call, ticket)) as deltas:
                found = []
                async for delta in deltas:
                    ticket.record.first_token_ns = ticket.record.first_token_ns or time.time_ns()
                    found.append(delta)
                return found

        try:
            async with asyncio.TaskGroup() as group:
                pairs = zip(self._calls, self._tickets, strict=True)
                tasks = [group.create_task(answer(call, ticket)) for call, ticket in pairs]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        await self._whole([task.result() for task in tasks], send)

    def _identity(self) -> Identity:
        return Identity(
            id=self._record.request_id.replace("req_", self._dialect.prefix),
            model=self._record.release,
            system_fingerprint=self._pipeline.fingerprints[self._record.release],
            verdicts=partial(self._pipeline.guards.verdicts, self._record)
            if self._calls[0].body.tells_verdicts
            else None,
        )

    async def _stream(self, writer: Writer, first: Delta, deltas: AsyncGenerator[Delta, None], send: Send) -> None:
        await self._begin_stream(send)
        await _body(send, writer.events(first), more=True)
        async for delta in deltas:
            await _body(send, writer.events(delta), more=True)
        await _body(send, writer.DONE, more=False)

    async def _begin_stream(self, send: Send) -> None:
        if not self._begun:
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            await self._start(200, headers, send)

    async def _whole(self, answers: Sequence[Sequence[Delta]], send: Send) -> None:
        body = self._dialect.whole(self._identity(), [call.body for call in self._calls], answers)
        await self._start(200, {"content-type": "application/json", "content-length": str(len(body))}, send)
        await _body(send, body, more=False)

    async def _fail(self, error: Exception, send: Send) -> None:
        shown = public(error)
        self._record.error = without_text(shown)
        if shown.status >= 500:
            log.error("%s failed", self._record.request_id, exc_info=error)
        if self._begun:
            self._record.status = shown.status
            await _body(send, error_event(shown.body()), more=False)
            return
        response = JSONResponse(shown.body())
        headers = {"content-type": "application/json", "content-length": str(len(response.body))}
        await self._start(shown.status, headers | error_headers(shown), send)
        await _body(send, bytes(response.body), more=False)

    async def _start(self, status: int, headers: dict[str, str], send: Send) -> None:
        self._begun, self._record.status = True, status
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in (headers | self._facts()).items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    def _facts(self) -> dict[str, str]:
        """What happened, as far as it is known when the status line is written."""
        record, reservation = self._record, self._tickets[0].reservation
        facts = {
            "x-request-id": record.request_id,
            "openai-processing-ms": str((time.time_ns() - record.started_ns) // 1_000_000),
            "x-gearshift-overhead-ms": f"{record.overhead_ms:.2f}",
        }
        if record.release:
            facts |= {
                "x-gearshift-tier": record.tier,
                "x-gearshift-release": record.release,
                "x-gearshift-route-reason": record.route_reason,
                "x-gearshift-cache": record.cache,
            }
        if record.ticket:
            facts["x-gearshift-ticket"] = record.ticket
        return facts | (reservation.headers() if reservation else {})


def _cache_use(cache_control: str) -> CacheUse:
    """As HTTP has it: `no-store` keeps nothing, `no-cache` wants a new answer, which is kept."""
    wishes = {part.strip().lower() for part in cache_control.split(",")}
    return "none" if "no-store" in wishes else "refresh" if "no-cache" in wishes else "any"


class Watch:
    """Cancels a task when its client goes away. Answers that come at once are not watched."""

    def __init__(self, receive: Receive, task: asyncio.Task[Any]) -> None:
        self._receive = receive
        self._task = task
        self._watching: asyncio.Task[None] | None = None
        self._later = asyncio.get_running_loop().call_later(WATCH_S, self._begin)
        self.gone = False

    def _begin(self) -> None:
        self._watching = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()

    def end(self) -> None:
        self._later.cancel()
        if self._watching is not None:
            self._watching.cancel()


async def _body(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
