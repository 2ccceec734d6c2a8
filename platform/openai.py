"""OpenAI's wire format: what comes in is checked here, what goes out is written here, and nobody else knows it.

A field that we do not serve yet is an error that names it, unless its value asks for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gearshift.platform.config import SamplingDefaults
from gearshift.platform.errors import InvalidRequest, UnsupportedParameter
from gearshift.platform.request import (
    Delta,
    JsonObject,
    Message,
    Role,
    SamplingParams,
    ScoredToken,
    ServiceClass,
    Usage,
)

Body = TypeVar("Body", bound=BaseModel)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "structured_outputs": (),
}
"""Of chat."""

SAMPLING_FIELDS = (
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields that are passed on under their own name when the request has them."""

HARMLESS = ("metadata",)
"""Accepted and without effect on the answer."""


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextPart(_Wire):
    type: Literal["text"]
    text: str


class WireMessage(_Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None
    name: str | None = None
    refusal: str | None = None

    def message(self) -> Message:
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role: Role = self.role
        return Message(role, content or "", self.name)


class ModerationMode(_Wire):
    mode: Literal["score", "block"]


class ModerationPolicy(_Wire):
    input: ModerationMode | None = None
    output: ModerationMode | None = None


class ModerationWish(_Wire):
    """To be told what the guardrails said. What they do is up to the policy of the release, whatever is wished for here."""

    model: str
    policy: ModerationPolicy | None = None


class StreamOptions(_Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CacheControl(_Wire):
    """Gearshift's extension: whether this answer may come from the cache and go into it."""

    mode: Literal["off", "deterministic", "all"] | None = None
    semantic: bool = True
    """Whether the answer to the same question in other words will do."""


class Generation(_Wire):
    """What every request for generated text may say."""

    MAX_STOPS: ClassVar[int] = 16
    MAX_CHOICES: ClassVar[int] = 16
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of the API that are not served yet, with the values that ask for nothing; null always is one."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """Names a session, for experiments that count by sessions."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    cache: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in HARMLESS:
                continue
            if name not in cls.NEUTRAL:
                kept[name] = value
            elif value is not None and value not in cls.NEUTRAL[name]:
                raise UnsupportedParameter(f"{name!r} is not supported yet; leave it out.", param=name)
        return kept

    @property
    def turns(self) -> tuple[Message, ...]:
        """What was said so far."""
        raise NotImplementedError

    @property
    def raw(self) -> bool:
        """To be continued as it is, and not answered."""
        return False

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Of a prompt that did not come as text."""
        return None

    @property
    def logprobs_wanted(self) -> int | None:
        """How many likeliest tokens are told beside each; None for nothing of it."""
        return None

    @property
    def wished_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """The request's wishes over the release's defaults."""
        wished = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if wished.get("top_k") == -1:  # vLLM's way to say "off"
            wished["top_k"] = 0
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=self.wished_tokens or defaults.max_completion_tokens,
            fit_context=self.wished_tokens is None,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            stop=tuple(text for text in stop if text),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.logprobs_wanted,
            **wished,
        )

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def tells_verdicts(self) -> bool:
        """Whether the answer is to say what the guardrails said."""
        return False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def service(self) -> ServiceClass:
        """OpenAI's flex tier is batch work; so is vLLM's `priority` above 0 (there too, a higher number waits longer)."""
        return "batch" if self.service_tier == "flex" or (self.priority or 0) > 0 else "interactive"

    @property
    def unit(self) -> str | None:
        """Who asks, as far as experiments are concerned."""
        return self.safety_identifier or self.user


class ChatRequest(Generation):
    """Body of `POST /v1/chat/completions`."""

    MAX_TOP: ClassVar[int] = 20
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    messages: Annotated[list[WireMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    moderation: ModerationWish | None = None

    @model_validator(mode="after")
    def _top_of_something(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

    @cached_property
    def turns(self) -> tuple[Message, ...]:
        return tuple(message.message() for message in self.messages)

    @property
    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wished_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def tells_verdicts(self) -> bool:
        return self.moderation is not None


def parse_as(kind: type[Body], body: bytes) -> Body:
    """Raises `InvalidRequest` (with the field's path in `param`) or `UnsupportedParameter`."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from error


def parse_chat(body: bytes) -> ChatRequest:
    """As `parse_as`."""
    return parse_as(ChatRequest, body)


def invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    if first["type"] == "extra_forbidden":
        return UnsupportedParameter(f"Unknown field {param!r}; check the spelling, or leave it out.", param=param)
    if first["type"] == "missing":
        return InvalidRequest(f"The field {param!r} is missing.", param=param)
    return InvalidRequest(f"{param or 'body'}: {first['msg'].removeprefix('Value error, ')}.", param=param or None)


def _is_branch(part: str | int) -> bool:
    """A union reports the branch it tried, which is not part of what the client wrote."""
    return isinstance(part, str) and (part == "str" or part.startswith(("list[", "constrained-")))


_json = msgspec.json.Encoder().encode


def usage_object(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


class Identity(msgspec.Struct, frozen=True):
    """What every part of one answer repeats."""

    id: str
    model: str
    system_fingerprint: str
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    verdicts: Callable[[], JsonObject] | None = None
    """OpenAI's `moderation`, when all has been said; None where nobody asked for it."""

    def moderation(self, tickets: Sequence[str]) -> JsonObject:
        """What is told at the end of an answer; tickets: of reviews that its choices wait for."""
        told = self.verdicts() if self.verdicts is not None else {}
        told |= {"tickets": list(tickets)} if any(tickets) else {}
        return {"moderation": told} if told else {}


def _choice(index: int, deltas: list[Delta]) -> JsonObject:
    text = "".join(delta.text for delta in deltas)
    message = {"role": "assistant", "content": text, "refusal": None}
    logprobs = logprobs_object([token for delta in deltas for token in delta.scored])
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": deltas[-1].finish_reason}


def logprobs_object(scored: Sequence[ScoredToken]) -> JsonObject | None:
    """None when there are none. The tokens make the text: one that only ended it is left out."""
    scored = [token for token in scored if not token.ends]
    if not scored:
        return None

    def shown(text: str, logprob: float | None) -> JsonObject:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        shown(token.text, token.logprob) | {"top_logprobs": [shown(text, value) for text, value in token.top]}
        for token in scored
    ]
    return {"content": content, "refusal": None}


def completion(identity: Identity, deltas: Sequence[Delta]) -> bytes:
    """The body of an answer that is not streamed, from all its pieces."""
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.choice, []).append(delta)
    usage = deltas[-1].usage or Usage(0, 0)
    return _json(
        {
            "id": identity.id,
            "object": "chat.completion",
            "created": identity.created,
            "model": identity.model,
            "choices": [_choice(index, choices[index]) for index in sorted(choices)],
            "usage": usage_object(usage),
            "system_fingerprint": identity.system_fingerprint,
        }
        | identity.moderation([delta.ticket for delta in deltas if delta.ticket])
    )


class ChunkWriter:
    """Writes one stream's SSE events. What is the same in every chunk is encoded once."""

    DONE: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(self, identity: Identity, include_usage: bool, choices: int = 1) -> None:
        head = {
            "id": identity.id,
            "object": "chat.completion.chunk",
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.system_fingerprint,
        }
        self._identity = identity
        self._tickets: list[str] = []
        self._head = b"data: " + _json(head)[:-1]
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._include_usage = include_usage
        self._started: set[int] = set()
        self._running = choices

    def events(self, delta: Delta) -> bytes:
        """The events of one Delta: text, and on the last one the finish reason and the usage."""
        parts = []
        started = delta.choice in self._started
        if delta.text or not started:
            fields = {"content": delta.text} if started else {"role": "assistant", "content": delta.text}
            parts.append(self._chunk(delta.choice, fields, None, delta.scored))
            self._started.add(delta.choice)
        if delta.finish_reason:
            self._running -= 1
            self._tickets += [delta.ticket] if delta.ticket else []
            parts.append(self._chunk(delta.choice, {}, delta.finish_reason))
            if self._include_usage and not self._running:
                usage = usage_object(delta.usage or Usage(0, 0))
                parts.append(b'%b,"choices":[],"usage":%b}\n\n' % (self._head, _json(usage)))
        return b"".join(parts)

    def _chunk(
        self, index: int, fields: dict[str, str], finish_reason: str | None, scored: Sequence[ScoredToken] = ()
    ) -> bytes:
        logprobs = logprobs_object(scored)
        choice = {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish_reason}
        told = self._identity.moderation(self._tickets) if finish_reason and not self._running else {}
        more = b"," + _json(told)[1:-1] if told else b""
        return b'%b,"choices":[%b]%b%b' % (self._head, _json(choice), more, self._tail)


def error_event(body: JsonObject) -> bytes:
    """An error after the stream has begun; nothing follows it."""
    return b"data: " + _json(body) + b"\n\n"


def model_object(name: str, created: int) -> JsonObject:
    return {"id": name, "object": "model", "created": created, "owned_by": "gearshift"}


def encode(value: Any) -> bytes:
    return _json(value)
