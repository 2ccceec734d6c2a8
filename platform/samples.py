"""What is told about a request afterwards, for whoever judges quality: frozen values that travel through Redis."""

from __future__ import annotations

from typing import Literal

import msgspec

Unit = Literal["user", "session", "request"]


class Exposure(msgspec.Struct, frozen=True, array_like=True):
    """An arm of an experiment, used for one unit."""

    experiment: str
    arm: str
    period: int = 0
    """Of the experiment's weights that chose the arm."""
    unit: str = ""
    """Digest of who asked, as the experiment counts."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request."""

    request_id: str
    tenant: str = ""
    at: float = 0.0
    """Seconds since the epoch, when it ended."""
    tier: str = ""
    release: str = ""
    exposures: tuple[Exposure, ...] = ()
    """Arms that were really used: not on a cache hit, nor where they stood in for another tier."""
    shadow: bool = False
    """Nobody saw the answer: the arm was asked beside the one that served."""
    cache: str = "bypass"
    status: int = 200
    error: str = ""
    finish_reason: str = ""
    ttft_s: float | None = None
    inter_token_s: float | None = None
    duration_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_dollars: float = 0.0
    blocked: bool = False
    """A guardrail blocked or redacted something of the answer."""
    wants_json: bool = False
    question: str = ""
    """Text is there only when the config asks for scores that read it, and is cut to `evaluation.text_chars`."""
    answer: str = ""
    context: str = ""
    """Retrieved text that the answer should rest on."""
    rival: str = ""
    """Of a shadow: what the client was answered."""
    has_text: bool = False
    trace: str = ""
    """W3C `traceparent` of the request's span, where it is traced."""


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """What a user said of an answer. value: 0 to 1."""

    request_id: str
    tenant: str
    at: float = 0.0
    value: float | None = None
    correction: str = ""
    comment: str = ""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What must be known of a request when feedback on it comes: whose it was, and what chose its answer."""

    tenant: str
    release: str = ""
    exposures: tuple[Exposure, ...] = ()


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A score that took a while to make, of a request that was told before. value: 0 to 1, or None and `label` says why."""

    request_id: str
    measure: str
    release: str
    exposures: tuple[Exposure, ...] = ()
    value: float | None = None
    label: str = ""
    trace: str = ""
