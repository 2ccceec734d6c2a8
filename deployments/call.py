"""One request on its way: as it arrived, where it may go, and what is roughly known of its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gearshift.deployments.samples import Heard
from gearshift.platform.cache.ahead import Early
from gearshift.platform.cache.limits import Reservation
from gearshift.platform.config import Config, Price
from gearshift.platform.openai import Generation
from gearshift.platform.request import Usage
from gearshift.platform.telemetry import Record
from gearshift.router.arms import Served
from gearshift.router.features import Query

CHARS_PER_TOKEN = 3
"""A low guess, so that what is reserved is rarely less than what is used."""


CacheUse = Literal["any", "refresh", "none", "never"]
"""refresh: a new answer, which is kept; none: the client wants nothing of the cache; never: nor do we."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it arrived."""

    id: str
    body: Generation
    authorization: str = ""
    use: CacheUse = "any"
    tier: str = ""
    """That the client wants `auto` to take, from its header."""
    came: int = 0
    """A hash of all that the client sent; 0 for what nobody did."""
    trace: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A release that may answer. `verify`: its answer is judged, as one to this query, before any of it is sent."""

    served: Served
    verify: Query | None = None


class Ticket:
    """What the steps have learned so far; one a request. The gateway reads the reservation's headers from it."""

    def __init__(self, record: Record, heard: Heard | None = None) -> None:
        self.record = record
        self.heard = heard or Heard(wanted=False)
        self.reservation: Reservation | None = None
        self.early: Early | None = None


def query_of(body: Generation) -> Query:
    """What the router looks at: the last thing the user said."""
    text = next((message.content for message in reversed(body.turns) if message.role == "user"), "")
    return Query(text, sum(message.role == "user" for message in body.turns))


def estimate_prompt(body: Generation) -> int:
    """Tokens, roughly."""
    if body.token_ids is not None:
        return len(body.token_ids)
    return sum(len(message.content) // CHARS_PER_TOKEN + 4 for message in body.turns)


def estimate_tokens(body: Generation, config: Config) -> int:
    """What the request may use at most, roughly: its text and the longest answer it allows."""
    prompt = estimate_prompt(body)
    answer = body.wished_tokens or max(release.sampling.max_completion_tokens for release in config.releases.values())
    return prompt + answer * body.choices


def cost(usage: Usage, price: Price) -> float:
    """US dollars; prices are a million tokens."""
    return (usage.prompt_tokens * price.input + usage.completion_tokens * price.output) / 1e6
