"""The HTTP API: owns the connection, and nothing of what is decided about a request."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gearshift import __version__
from gearshift.deployments.call import Call, Ticket
from gearshift.deployments.exposition import metrics_page
from gearshift.deployments.feedback import parse_feedback
from gearshift.deployments.pipeline import Pipeline, without_text
from gearshift.deployments.samples import Heard, SampleLog
from gearshift.deployments.shadow import Shadows
from gearshift.platform import telemetry
from gearshift.platform.cache.store import StoreAway
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
from gearshift.platform.openai import ChunkWriter, Identity, completion, error_event, model_object, parse_chat
from gearshift.platform.request import Delta
from gearshift.platform.telemetry import Emitter, Record
from gearshift.platform.tenants import require_token

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""nginx's status for a client that went away; only ever seen in records."""


def create_app(
    serving: Callable[[], Pipeline],
    config: Gateway,
    emitter: Emitter,
    ready: Callable[[], str | None],
    samples: SampleLog,
    shadows: Shadows,
    metrics_token: str | None = None,
) -> FastAPI:
    """`serving`: the pipeline of the present revision; a request keeps the one that it began with. `ready` says what is still
    missing, or None."""
    app = FastAPI(title="Gearshift", version=__version__, docs_url=None, redoc_url=None)
    created = int(time.time())

    class ChatCompletions:
        """The hot route, as plain ASGI: FastAPI's argument machinery has nothing to do for it."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await ChatExchange(Request(scope, receive), serving(), config, emitter, samples, shadows).respond(
                receive, send
            )

    app.router.routes.append(Route("/v1/chat/completions", ChatCompletions(), methods=["POST"]))

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
        given = parse_feedback(await read_body(request, config.max_body_bytes))
        try:
            counted = await samples.feedback(given.feedback(caller.tenant))
        except StoreAway as error:
            raise StoreUnavailable("Feedback can't be taken just now; send it again.", retry_after_s=1.0) from error
        return JSONResponse({"object": "feedback", "request_id": given.request_id, "counted": counted})

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
    return app


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


class ChatExchange:
    """One request and its answer, from its first byte to its last.

    All of it runs in one task, which is cancelled when the client goes away or the deadline passes: closing the
    pipeline's generator is the one mechanism that stops what is below. The status line waits for the first Delta, so
    that an early failure has a real status.
    """

    def __init__(
        self,
        request: Request,
        pipeline: Pipeline,
        config: Gateway,
        emitter: Emitter,
        samples: SampleLog,
        shadows: Shadows,
    ) -> None:
        self._request = request
        self._pipeline = pipeline
        self._config = config
        self._emitter = emitter
        self._samples = samples
        self._shadows = shadows
        self._call: Call | None = None
        self._ticket = Ticket(Record(_new_id()), Heard(samples.wants_text))
        self._record = self._ticket.record
        self._begun = False

    async def respond(self, receive: Receive, send: Send) -> None:
        body = await self._read_body()  # before anybody else may call receive
        work = asyncio.create_task(self._work(body, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                telemetry.ABANDONED.inc()
                work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

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
                call = self._call = Call(
                    id=record.request_id,
                    body=parse_chat(body),
                    authorization=headers.get("authorization", ""),
                    no_cache=_refuses_cache(headers.get("cache-control", "")),
                    tier=headers.get("x-gearshift-tier", ""),
                    trace=self._emitter.propagate(span),
                )
                await self._answer(call, send)
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
            self._samples.told(record, self._ticket.heard)
            if self._call is not None:
                self._shadows.offer(self._pipeline, self._call, self._ticket)

    async def _answer(self, call: Call, send: Send) -> None:
        self._record.stream = bool(call.body.stream)
        async with aclosing(self._pipeline.run(call, self._ticket)) as deltas:
            first = await anext(deltas)
            self._record.first_token_ns = time.time_ns()
            identity = Identity(
                id=call.id.replace("req_", "chatcmpl-"),
                model=self._record.release,
                system_fingerprint=self._pipeline.fingerprints[self._record.release],
            )
            if call.body.stream:
                writer = ChunkWriter(identity, call.body.include_usage, call.body.choices)
                await self._stream(writer, first, deltas, send)
            else:
                await self._whole(identity, first, deltas, send)

    async def _stream(self, writer: ChunkWriter, first: Delta, deltas: AsyncGenerator[Delta, None], send: Send) -> None:
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}, send)
        await _body(send, writer.events(first), more=True)
        async for delta in deltas:
            await _body(send, writer.events(delta), more=True)
        await _body(send, writer.DONE, more=False)

    async def _whole(self, identity: Identity, first: Delta, deltas: AsyncGenerator[Delta, None], send: Send) -> None:
        body = completion(identity, [first, *[delta async for delta in deltas]])
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
        record, reservation = self._record, self._ticket.reservation
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
        return facts | (reservation.headers() if reservation else {})


def _refuses_cache(cache_control: str) -> bool:
    return not {"no-cache", "no-store"}.isdisjoint(part.strip().lower() for part in cache_control.split(","))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
