"""Texts that an answer must not contain, whatever tokens they are made of: what would complete one is not drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Banned:
    """Of one answer. Case does not matter."""

    def __init__(self, tokenizer: Any, terms: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._terms = [term.casefold() for term in terms]
        self._most_tokens = max(len(term.encode()) for term in self._terms)
        """That a term can be made of: each token is a byte at least."""

    def refuses(self, output: Sequence[int], token: int) -> bool:
        """Whether a term would be whole with this token. output: before it, without any."""
        ids = [*output[-self._most_tokens :], token]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True).casefold()
        return any(term in text for term in self._terms)
