"""The nouns everybody shares: what is asked, how to sample, and what comes back. Frozen values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "content_filter"]
ServiceClass = Literal["interactive", "batch"]
"""batch work fills what interactive requests leave."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Watermark:
    """By which an answer is known again. strength: added to the logits of green tokens. share: of the vocabulary that is
    green."""

    key: int = field(repr=False)
    """A secret."""
    strength: float = 2.0
    share: float = 0.25


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults leave the model's distribution as it is.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `max_tokens` None means until the context is full.
    `seed` makes a sampled answer repeatable whatever else is in the batch.
    """

    max_tokens: int | None = None
    fit_context: bool = False
    """Shorten `max_tokens` to what the context has room for, instead of refusing the request."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    certainty: bool = False
    """Also tell how probable each token was, and how open the choice."""
    logprobs: int | None = None
    """Also tell each token with its log-probability and those of so many likeliest ones; None for nothing of it."""
    echo: bool = False
    """Begin with the prompt; with `logprobs` its tokens are told too."""
    watermark: Watermark | None = None
    """Of the release, never of a request."""
    banned: tuple[str, ...] = ()
    """Of the release's policy: what the answer must not contain."""

    @property
    def deterministic(self) -> bool:
        return self.temperature == 0 or self.seed is not None


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, as an engine sees it."""

    id: str
    messages: tuple[Message, ...]
    """None where there is a `prompt`."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    service: ServiceClass = "interactive"
    cache_salt: str = ""
    """Narrows who shares cached prefixes with this request; never shared between tenants."""
    trace: dict[str, str] = field(default_factory=dict)
    """W3C trace context of the caller (`traceparent`), empty when the request is not traced."""
    prompt: str | tuple[int, ...] | None = None
    """Text, or token ids, to be continued as it is: no chat template, no turns."""
    resume: tuple[int, ...] = ()
    """Tokens of the answer that another engine generated before it was lost: the answer goes on after them."""
    sent: int = 0
    """Characters of the answer that need not be sent again."""
    session: str = ""
    """Requests of one session go to the same replica where nothing speaks against it."""
    seed: int | None = None
    """Drawn for a request that has none of its own, so that its answer goes on as it would have."""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """logprob: natural logarithm of its probability under the model, before temperature and filters; None for the first token
    of a prompt. top: the likeliest tokens there with theirs, and this one, likeliest first."""

    text: str
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()
    ends: bool = False
    """The answer ended with it, and does not show it."""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """The next piece of an answer. The last one has a `finish_reason` and the `usage`; it may have no text."""

    text: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    tokens: int = 1
    """How many tokens came with this piece: more than one where text was held back until a character was whole."""
    choice: int = 0
    """Which of several answers to the request (`n`) this is a piece of."""
    logprobs: tuple[float, ...] = ()
    """Of its tokens, natural logarithms; only when the sampling asks for `certainty`, as the entropies."""
    entropies: tuple[float, ...] = ()
    """Of the distributions they were drawn from, in nats; none from a server that does not tell."""
    scored: tuple[ScoredToken, ...] = ()
    """Its tokens, when the sampling asks for `logprobs`."""
    echo: bool = False
    """This is the prompt."""
    ids: tuple[int, ...] = ()
    """Of its tokens; none from a server that does not tell."""
    ticket: str = ""
    """Of a human's review, for which the rest of the answer waits."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine holds right now; all zero when it is idle. `steps` and the counters after it only grow."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    queued_tokens: int = 0
    """Known tokens that are still to be computed, of all that run and wait."""
    kv_tokens_total: int = 0
    """That fit into the cache."""
    dispersion: float = 0.0
    """Weighted tokens between the most and the least served of the tenants that wait."""


JsonObject = dict[str, Any]
