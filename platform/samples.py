"""What is told about a request afterwards, for whoever judges quality: frozen values that travel through Redis."""

from __future__ import annotations

from typing import Literal

import msgspec

Unit = Literal["user", "session", "request"]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request. `experiment` and `arm` are empty when no experiment chose the release."""

    request_id: str
    tenant: str = ""
    at: float = 0.0
    """Seconds since the epoch, when it ended."""
    unit: str = ""
    """Digest of who asked, as the experiment counts."""
    tier: str = ""
    release: str = ""
    experiment: str = ""
    arm: str = ""
    period: int = 0
    """Of the experiment's weights that chose the arm."""
    exposed: bool = False
    """The arm was really used: not on a cache hit, nor where it stood in for another tier."""
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
    experiment: str = ""
    arm: str = ""
    period: int = 0
    unit: str = ""
    exposed: bool = False
