"""What a check says: a small alphabet, with the rule and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Stage = Literal["input", "output"]
Action = Literal["allow", "redact", "block"]


class Span(NamedTuple):
    """Characters [start, end) of a text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that had something to say about a text."""

    rule: str
    action: Action
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one text. `text` is what may go on: the original, the redacted, or nothing when blocked."""

    action: Action
    text: str
    findings: tuple[Finding, ...] = ()

    @property
    def rule(self) -> str:
        """The rule that decided: the first that blocked, else the first that redacted."""
        return next((finding.rule for finding in self.findings if finding.action == self.action), "")
