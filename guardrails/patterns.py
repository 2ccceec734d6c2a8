"""Rules made of patterns: where in a text is something that must not pass, and how much of its end may still become such a thing.

Patterns run on RE2, whose time is linear in the text: no input can make them slow. Their unbounded parts come last, so
that a finding shows itself within `stream.WINDOW_CHARS` characters.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, Protocol

import re2

from gearshift.guardrails.verdict import Span

WORD = string.ascii_letters + string.digits + "_"


class Rule(Protocol):
    name: str

    def find(self, text: str) -> list[Span]:
        """Every place that must not pass, in order."""
        ...

    def open_from(self, text: str) -> int:
        """Index from which the end of `text` may, with more text to come, be part of a finding; len(text) if none."""
        ...


def places(rule: Rule, text: str) -> list[Span]:
    """What the rule finds. Raises what the rule raises, and `TypeError` or `ValueError` for an answer that is none."""
    found = [Span(start, end) for start, end in rule.find(text)]
    if any(not 0 <= start <= end <= len(text) for start, end in found):
        raise ValueError(f"{rule.name}: places outside of the text")
    return found


def word_start(text: str, at: int) -> int:
    """Where the word begins that reaches to `at`: a pattern may ask what stands before it."""
    return len(text[:at].rstrip(WORD))


class Patterns:
    """Finds regular expressions.

    `alphabet` holds every character of a finding: the text is open from where only those follow. `mark` is a character that
    every finding has, if there is one: a text without it is done at the cost of a search for it.
    """

    def __init__(self, name: str, patterns: Sequence[str], alphabet: str, mark: str = "") -> None:
        self.name = name
        self._pattern: Any = re2.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        self._alphabet = alphabet
        self._mark = mark

    def find(self, text: str) -> list[Span]:
        if self._mark not in text or self._pattern.search(text) is None:
            return []
        return [Span(*match.span()) for match in self._pattern.finditer(text)]

    def open_from(self, text: str) -> int:
        end = len(text.rstrip(self._alphabet))
        return end if end == len(text) else word_start(text, end)
