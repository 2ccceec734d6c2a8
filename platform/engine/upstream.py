"""A model served elsewhere: any OpenAI-compatible server, streamed over httpx behind the Engine protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import httpx

from gearshift.platform.config import Upstream
from gearshift.platform.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    GearshiftError,
    InvalidRequest,
    Overloaded,
    UpstreamError,
)
from gearshift.platform.request import Delta, EngineStats, FinishReason, JsonObject, Request, SamplingParams, Usage

FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "content_filter": "content_filter"}
EXTRAS = ("top_k", "min_p", "min_tokens", "ignore_eos", "repetition_penalty")
"""Sampling fields that OpenAI does not have; sent only when they say something, as vLLM names them."""


class UpstreamEngine:
    """Owns the connection pool to one server. The key comes from the environment and never leaves this object."""

    def __init__(self, config: Upstream, environ: Mapping[str, str]) -> None:
        headers = {}
        if config.api_key_env is not None:
            headers["authorization"] = f"Bearer {environ[config.api_key_env]}"
        timeout = httpx.Timeout(config.read_timeout_s, connect=config.connect_timeout_s)
        self._model = config.model
        self._client = httpx.AsyncClient(base_url=config.base_url.rstrip("/") + "/", headers=headers, timeout=timeout)
        self._running = self._aborted = self._prompt_tokens = self._generation_tokens = 0

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self._running += 1
        finished = False
        try:
            async with aclosing(self._deltas(request)) as deltas:
                async for delta in deltas:
                    finished = delta.finish_reason is not None
                    if delta.usage is not None:
                        self._prompt_tokens += delta.usage.prompt_tokens
                        self._generation_tokens += delta.usage.completion_tokens
                    yield delta
        except httpx.ConnectError as error:
            raise EngineUnavailable("The server behind this model can't be reached.") from error
        except httpx.TimeoutException as error:
            raise DeadlineExceeded("The server behind this model took too long.") from error
        except httpx.HTTPError as error:
            raise UpstreamError("The connection to the server behind this model broke.") from error
        finally:
            self._running -= 1
            self._aborted += not finished

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._running,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            aborted=self._aborted,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def _deltas(self, request: Request) -> AsyncGenerator[Delta, None]:
        if request.prompt is not None or request.sampling.logprobs is not None:
            raise InvalidRequest("The server behind this model is asked for chat only, and without logprobs.")
        body = request_body(self._model, request)
        async with self._client.stream("POST", "chat/completions", json=body, headers=request.trace) as response:
            if response.status_code != 200:
                raise error_of(response.status_code, await response.aread(), response.headers)
            finish_reason: FinishReason | None = None
            usage = Usage(0, 0)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    break
                chunk = _json(data)
                if "error" in chunk:
                    raise UpstreamError("The server behind this model failed while it was answering.")
                usage = _usage(chunk) or usage
                for choice in chunk.get("choices", []):
                    finish_reason = FINISH_REASONS.get(choice.get("finish_reason") or "", finish_reason)
                    if text := choice.get("delta", {}).get("content"):
                        yield Delta(text, logprobs=_logprobs(choice))
            if finish_reason is None:
                raise UpstreamError("The answer of the server behind this model ended too early.")
            yield Delta("", finish_reason, usage)


def request_body(model: str, request: Request) -> JsonObject:
    sampling, default = request.sampling, SamplingParams()
    messages = [
        {"role": message.role, "content": message.content} | ({"name": message.name} if message.name else {})
        for message in request.messages
    ]
    body: JsonObject = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.max_tokens is not None:
        body["max_completion_tokens"] = sampling.max_tokens
    for name in ("seed", "presence_penalty", "frequency_penalty", *EXTRAS):
        if getattr(sampling, name) != getattr(default, name):
            body[name] = getattr(sampling, name)
    if sampling.certainty:
        body["logprobs"] = True
    for name in ("stop", "stop_token_ids"):
        if getattr(sampling, name):
            body[name] = list(getattr(sampling, name))
    return body


def error_of(status: int, body: bytes, headers: Mapping[str, str]) -> GearshiftError:
    """What a failed answer of the server means to our client. Its text is passed on only where it is about the request."""
    try:
        detail = json.loads(body)["error"]
        code, message, param = detail.get("code"), str(detail.get("message")), detail.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        code, message, param = None, "", None
    if code == "context_length_exceeded":
        return ContextLengthExceeded(message, param)
    if status in (400, 422) and message:
        return InvalidRequest(message, param)
    if status in (429, 503):
        return Overloaded("The server behind this model is busy.", retry_after_s=_seconds(headers.get("retry-after")))
    return UpstreamError(f"The server behind this model answered with status {status}.")


def _seconds(text: str | None) -> float:
    try:
        return min(120.0, max(0.0, float(text or "")))
    except ValueError:
        return 1.0


def _json(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise UpstreamError("The server behind this model sent something that is not JSON.") from error
    return value if isinstance(value, dict) else {}


def _logprobs(choice: dict[str, Any]) -> tuple[float, ...]:
    """Of the tokens of one chunk; none from a server that leaves them out."""
    tokens = (choice.get("logprobs") or {}).get("content") or []
    return tuple(float(token["logprob"]) for token in tokens if "logprob" in token)


def _usage(chunk: dict[str, Any]) -> Usage | None:
    usage = chunk.get("usage")
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), details.get("cached_tokens") or 0)
