"""OpenAI's older wire format: a prompt is continued, as text or as token ids. What evaluation harnesses speak.

A release's system prompt is not used here, since there are no turns; its model, guardrails and sampling defaults are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import msgspec
from pydantic import Field, model_validator

from gearshift.platform.config import SamplingDefaults
from gearshift.platform.openai import Generation, Identity, parse_as, usage_object
from gearshift.platform.request import Delta, JsonObject, Message, SamplingParams, ScoredToken, Usage

DEFAULT_TOKENS = 16
"""As OpenAI has it."""
MAX_PROMPTS = 128
_json = msgspec.json.Encoder().encode

Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Prompted(Generation):
    """One prompt of a request."""

    prompt: str | Ids
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 together with `echo`: nothing but the prompt is told."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "logit_bias": ({},),
        "suffix": ("",),
        "best_of": (1,),
        "use_beam_search": (False,),
        "prompt_logprobs": (),
        "response_format": ({"type": "text"},),
    }

    @model_validator(mode="after")
    def _something_to_say(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 asks for nothing; set echo: true, or at least 1")
        return self

    @property
    def turns(self) -> tuple[Message, ...]:
        return (Message("user", self.prompt if isinstance(self.prompt, str) else ""),)

    @property
    def raw(self) -> bool:
        return True

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        return None if isinstance(self.prompt, str) else tuple(self.prompt)

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def wished_tokens(self) -> int | None:
        return DEFAULT_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        wished = super().sampling(defaults)
        return replace(wished, echo=True) if self.echo else wished


class CompletionRequest(Prompted):
    """Body of `POST /v1/completions`: one prompt, or several that are continued independently."""

    prompt: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]  # type: ignore[assignment]  # wider: `each` narrows it

    @model_validator(mode="after")
    def _one_stream(self) -> Self:
        if self.stream and len(self.prompts) > 1:
            raise ValueError("stream: takes a single prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def each(self) -> list[Prompted]:
        """A request for each prompt."""
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return [Prompted.model_construct(self.model_fields_set, **(fields | {"prompt": each})) for each in self.prompts]


def parse_completions(body: bytes) -> list[Prompted]:
    """One for each prompt. Raises `InvalidRequest` or `UnsupportedParameter`."""
    return parse_as(CompletionRequest, body).each()


def logprobs_object(deltas: Sequence[Delta], offset: int = 0) -> JsonObject | None:
    """As OpenAI has it: four lists, an entry a token, also for one that ended the answer: harnesses count on it. offset:
    characters of the text before. None without any."""
    told: JsonObject = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for delta in deltas:
        at = offset
        for token in delta.scored:
            told["tokens"].append(token.text)
            told["token_logprobs"].append(token.logprob)
            told["top_logprobs"].append(_top(token))
            told["text_offset"].append(at)
            at += len(token.text)
        offset += len(delta.text)
    return told if told["tokens"] else None


def _top(token: ScoredToken) -> dict[str, float] | None:
    """By text; of tokens with the same text the likeliest."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in token.top:
        found.setdefault(text, logprob)
    return found


def completion(identity: Identity, bodies: Sequence[Prompted], answers: Sequence[Sequence[Delta]]) -> bytes:
    """The body of an answer that is not streamed: all choices of the first prompt, then those of the next."""
    choices, usages = [], []
    for place, (body, deltas) in enumerate(zip(bodies, answers, strict=True)):
        for choice in range(body.choices):
            mine = _without_answer(body, [delta for delta in deltas if delta.choice == choice])
            choices.append(
                {
                    "index": place * body.choices + choice,
                    "text": "".join(delta.text for delta in mine),
                    "logprobs": logprobs_object(mine),
                    "finish_reason": mine[-1].finish_reason,
                }
            )
        usages.append(deltas[-1].usage or Usage(0, 0))
    usage = Usage(
        sum(each.prompt_tokens for each in usages),
        sum(each.completion_tokens for each in usages) * bool(bodies[0].max_tokens != 0),
        sum(each.cached_tokens for each in usages),
    )
    told = identity.moderation([delta.ticket for deltas in answers for delta in deltas if delta.ticket])
    return _json(_head(identity) | {"choices": choices, "usage": usage_object(usage)} | told)


def _without_answer(body: Prompted, deltas: list[Delta]) -> list[Delta]:
    """With `max_tokens: 0` the one token that was generated is not told."""
    if body.max_tokens != 0:
        return deltas
    return [*(delta for delta in deltas if delta.echo), Delta("", "length")]


def _head(identity: Identity) -> JsonObject:
    return {
        "id": identity.id,
        "object": "text_completion",
        "created": identity.created,
        "model": identity.model,
        "system_fingerprint": identity.system_fingerprint,
    }


class CompletionWriter:
    """Writes one stream's SSE events."""

    DONE: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(self, identity: Identity, body: Prompted) -> None:
        self._identity = identity
        self._body = body
        self._running = body.choices
        self._offsets = [0] * body.choices

    def events(self, delta: Delta) -> bytes:
        [told] = _without_answer(self._body, [delta])[:1]
        choice = {
            "index": delta.choice,
            "text": told.text,
            "logprobs": logprobs_object([told], self._offsets[delta.choice]),
            "finish_reason": delta.finish_reason,
        }
        self._offsets[delta.choice] += len(told.text)
        parts = [self._event([choice], None)] if told.text or told.scored or delta.finish_reason else []
        self._running -= delta.finish_reason is not None
        if delta.finish_reason and self._body.include_usage and not self._running:
            parts.append(self._event([], usage_object(delta.usage or Usage(0, 0))))
        return b"".join(parts)

    def _event(self, choices: list[JsonObject], usage: JsonObject | None) -> bytes:
        extra = {"usage": usage} if self._body.include_usage else {}
        return b"data: " + _json(_head(self._identity) | {"choices": choices} | extra) + b"\n\n"
