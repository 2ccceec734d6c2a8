"""From token ids to text that may be sent: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decodes(Protocol):
    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """Turns ids into text as they come. Owns the two offsets that say which ids are already text.

    A window of earlier ids is decoded along with the new ones, since many tokenizers decode a token differently at
    the start of a text; a trailing replacement character means that a character is not complete yet.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context_start = 0
        self._read = 0

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        return self._take(final=False)

    def flush(self) -> str:
        """What is left when no more ids will come; an incomplete character becomes U+FFFD."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        known = self._decode(self._context_start, self._read)
        text = self._decode(self._context_start, len(self._ids))
        if not final and text.endswith("�"):
            return ""
        self._context_start, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True) if end > start else ""


class StopStrings:
    """Cuts the text before the first stop string; holds back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The part that may be sent now."""
        if not self._stops:
            return text
        self._held += text
        cuts = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if cuts:
            self.found = True
            released, self._held = self._held[: min(cuts)], ""
            return released
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def flush(self) -> str:
        released, self._held = self._held, ""
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
