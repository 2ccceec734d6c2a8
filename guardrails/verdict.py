"""What a check says: a small alphabet, with the rule and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Stage = Literal["input", "output"]
Action = Literal["allow", "redact", "review", "block"]
Fail = Literal["closed", "open"]


class Span(NamedTuple):
    """Characters [start, end) of a text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that had something to say about a text, or could not run."""

    rule: str
    action: Action
    """What it does about it."""
    spans: tuple[Span, ...]
    score: float | None = None
    """Of a trained rule, 0 to 1."""
    shadow: bool = False
    """It only says what it would do."""
    failed: bool = False
    """It could not run; `action` is what the policy wants then."""
    plain: bool = False
    """It had to do without the vector that it asked for."""

    @property
    def told(self) -> str:
        """The action, as metrics and traces name it. What did not run is never told as if it had."""
        if self.failed:
            return "failed_open" if self.action == "allow" else "failed_closed"
        if self.plain and self.action == "allow":
            return "allow_without_vector"
        return f"would_{self.action}" if self.shadow else self.action


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one text. `text` is what may go on: the original, the redacted, or nothing when blocked; with `review`,
    once a human has agreed."""

    action: Action
    text: str
    findings: tuple[Finding, ...] = ()

    @property
    def decided_by(self) -> Finding | None:
        """The first rule that did what was decided."""
        return next((each for each in self.findings if each.action == self.action and not each.shadow), None)

    @property
    def rule(self) -> str:
        """Its name; empty when nothing was decided."""
        return self.decided_by.rule if self.decided_by else ""
