"""Rules: where in a text is something that must not pass, and how much of its end may still become such a thing.

Patterns run on RE2, whose time is linear in the text: no input can make them slow. Their unbounded parts come last, so
that a finding shows itself within `stream.WINDOW_CHARS` characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import re2

from gearshift.guardrails.verdict import Span

SECRET_PATTERNS = (
    r"sk-[A-Za-z0-9_-]{20,}",  # OpenAI and those who copied the form
    r"gs-[A-Za-z0-9_-]{20,}",  # our own API keys
    r"gh[pousr]_[A-Za-z0-9]{36,}",  # GitHub
    r"github_pat_[A-Za-z0-9_]{22,}",
    r"glpat-[A-Za-z0-9_-]{20,}",  # GitLab
    r"xox[abprs]-[A-Za-z0-9-]{10,}",  # Slack
    r"(?:AKIA|ASIA)[0-9A-Z]{16}",  # AWS access key id
    r"AIza[0-9A-Za-z_-]{35}",  # Google API key
    r"hf_[A-Za-z0-9]{30,}",  # Hugging Face
    r"eyJ[A-Za-z0-9_-]{8,180}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)?",  # JSON Web Token
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[A-Za-z0-9+/=\s]*(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?",
)
EMAIL_PATTERN = r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,63}"  # lengths of RFC 5321, 4.5.3.1
CARD_PATTERN = r"\d(?:[ -]?\d){12,18}"


class Rule(Protocol):
    name: str

    def find(self, text: str) -> list[Span]:
        """Every place that must not pass, in order."""
        ...

    def open_from(self, text: str) -> int:
        """Index from which the end of `text` may, with more text to come, be part of a finding; len(text) if none."""
        ...


class Patterns:
    """Finds regular expressions. `tail` is a pattern, anchored at the end, of what may still grow into a finding."""

    def __init__(self, name: str, patterns: Sequence[str], tail: str) -> None:
        self.name = name
        self._pattern: Any = re2.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        self._tail: Any = re2.compile(f"(?:{tail})$")

    def find(self, text: str) -> list[Span]:
        return [Span(*match.span()) for match in self._pattern.finditer(text)]

    def open_from(self, text: str) -> int:
        match = self._tail.search(text)
        return int(match.start()) if match else len(text)


class Cards(Patterns):
    """Payment card numbers: 13 to 19 digits whose Luhn checksum (ISO/IEC 7812-1, annex B) is right."""

    def __init__(self) -> None:
        super().__init__("card", [CARD_PATTERN], r"\d(?:[ -]?\d)*[ -]?")

    def find(self, text: str) -> list[Span]:
        return [span for span in super().find(text) if luhn(text[span.start : span.end])]


class Blocklist:
    """Terms, whatever their case."""

    def __init__(self, terms: Sequence[str]) -> None:
        self.name = "blocklist"
        self._terms = [term.lower() for term in terms]
        self._pattern: Any = re2.compile("(?i)" + "|".join(re2.escape(term) for term in terms))

    def find(self, text: str) -> list[Span]:
        return [Span(*match.span()) for match in self._pattern.finditer(text)]

    def open_from(self, text: str) -> int:
        lowered = text.lower()
        return len(text) - max(_overlap(lowered, term) for term in self._terms)


def luhn(text: str) -> bool:
    digits = [int(character) for character in reversed(text) if character.isdigit()]
    doubled = (digit * 2 - 9 if digit > 4 else digit * 2 for digit in digits[1::2])
    return (sum(digits[0::2]) + sum(doubled)) % 10 == 0


def _overlap(text: str, term: str) -> int:
    return next((n for n in range(min(len(term) - 1, len(text)), 0, -1) if text.endswith(term[:n])), 0)


def make_rule(name: str, terms: Sequence[str]) -> Rule:
    """The rule of a name in the config."""
    if name == "blocklist":
        return Blocklist(terms)
    if name == "card":
        return Cards()
    if name == "email":
        return Patterns("email", [EMAIL_PATTERN], r"[A-Za-z0-9._%+@-]+")
    if name == "secrets":
        return Patterns("secrets", SECRET_PATTERNS, r"[A-Za-z0-9_.-]+|-----BEGIN[A-Za-z0-9+/=\s-]*")
    raise ValueError(f"no rule named {name!r}")
