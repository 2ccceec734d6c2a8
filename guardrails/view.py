"""A text as a rule reads it, with the way back: every character knows which characters of the original it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gearshift.guardrails.verdict import Span


class Edit(NamedTuple):
    """`text` in the place of the characters [start, end) of a view; `order` tells which of them each character of it stands
    for, by index from `start`. Without it each stands for the one in its place, or for all where the lengths differ."""

    start: int
    end: int
    text: str
    order: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class View:
    text: str
    starts: Sequence[int]
    """Of each character: where what it stands for begins in the original."""
    ends: Sequence[int]

    @classmethod
    def of(cls, text: str) -> View:
        return cls(text, range(len(text)), range(1, len(text) + 1))

    def origin(self, span: Span) -> Span:
        """The characters of the original that the characters of a span stand for; an empty span has none."""
        if span.start >= span.end:
            return Span(0, 0)
        return Span(min(self.starts[span.start : span.end]), max(self.ends[span.start : span.end]))

    def edited(self, edits: Iterable[Edit]) -> View:
        """With edits made, which come in order and don't overlap."""
        parts: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        done = 0
        for edit in edits:
            parts += self.text[done : edit.start], edit.text
            starts += self.starts[done : edit.start]
            ends += self.ends[done : edit.start]
            old_starts, old_ends = self.starts[edit.start : edit.end], self.ends[edit.start : edit.end]
            if edit.order is not None:
                starts += [old_starts[index] for index in edit.order]
                ends += [old_ends[index] for index in edit.order]
            elif len(edit.text) == len(old_starts):
                starts += old_starts
                ends += old_ends
            elif edit.text:  # an insertion stands for the character before it
                first, last = (min(old_starts), max(old_ends)) if old_starts else (self._before(edit.start),) * 2
                starts += [first] * len(edit.text)
                ends += [last] * len(edit.text)
            done = edit.end
        if not parts:
            return self
        parts.append(self.text[done:])
        starts += self.starts[done:]
        ends += self.ends[done:]
        return View("".join(parts), starts, ends)

    def _before(self, index: int) -> int:
        return self.ends[index - 1] if index else 0
