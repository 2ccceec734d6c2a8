"""From token ids to text that may be sent: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gearshift.platform.engine.sequence import Sampled, Sequence
from gearshift.platform.request import Delta, FinishReason, ScoredToken, Usage


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

    def push(self, ids: Iterable[int]) -> str:
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

    def __init__(self, stops: Iterable[str]) -> None:
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


class AnswerText:
    """One answer as it grows: tokens in, deltas out. Owns the decision that a stop string has ended it."""

    def __init__(self, tokenizer: Decodes, sequence: Sequence) -> None:
        self._sequence = sequence
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(sequence.sampling.stop)
        self._count = self._sent = 0
        self._tokenizer = tokenizer
        self._logprobs: list[float] = []
        self._entropies: list[float] = []
        self._scored: list[ScoredToken] = []
        self._ids: list[int] = []
        self._unsent = ""

    @property
    def stopped(self) -> bool:
        """A stop string was found: the engine need not go on."""
        return self._stops.found

    def push(self, token: Sampled, finish_reason: FinishReason | None) -> Delta | None:
        """What may be sent now, if anything. The last one has a finish reason."""
        self._count += 1
        self._ids.append(token.id)
        if token.logprob is not None and self._sequence.sampling.certainty:
            self._logprobs.append(token.logprob)
            self._entropies.append(token.entropy)
        hidden = finish_reason == "stop"  # the end-of-text token has no text
        if self._sequence.sampling.logprobs is not None and token.logprob is not None:
            self._scored.append(self._told(token.id, token.logprob, token.top, hidden))
        text = self._unsent + self._stops.push("" if hidden else self._detokenizer.push([token.id]))
        self._unsent = ""
        if finish_reason and not self._stops.found:
            text += self._stops.push(self._detokenizer.flush())
            text += "" if self._stops.found else self._stops.flush()
        if self._stops.found:
            finish_reason = "stop"
        if not (text or finish_reason):
            return None
        tokens, self._sent = self._count - self._sent, self._count
        logprobs, entropies, scored = tuple(self._logprobs), tuple(self._entropies), tuple(self._scored)
        ids = tuple(self._ids)
        for told in (self._logprobs, self._entropies, self._scored, self._ids):
            told.clear()
        sequence = self._sequence
        usage = Usage(len(sequence.prompt_ids), self._count, sequence.cached_tokens) if finish_reason else None
        return Delta(text, finish_reason, usage, tokens, logprobs=logprobs, entropies=entropies, scored=scored, ids=ids)

    def resume(self, ids: list[int], sent: int) -> None:
        """Takes in what another engine generated, of which so many characters were sent."""
        text = "".join([self._stops.push(self._detokenizer.push([token])) for token in ids])
        self._unsent = text[sent:]
        self._count = self._sent = len(ids)

    def prompt(self) -> Delta:
        """The prompt itself, to be told before the answer."""
        sequence = self._sequence
        text = sequence.prompt_text
        if text is None:
            text = self._tokenizer.decode(sequence.prompt_ids, skip_special_tokens=False)
        if sequence.sampling.logprobs is None:
            return Delta(text, tokens=0, echo=True)
        known = sequence.prompt_scores
        scored = tuple(
            self._told(token, known[place].logprob, known[place].top)
            if place in known
            else ScoredToken(self._name(token))
            for place, token in enumerate(sequence.prompt_ids)
        )
        return Delta(text, tokens=0, scored=scored, echo=True)

    def _told(self, token: int, logprob: float, top: tuple[tuple[int, float], ...], ends: bool = False) -> ScoredToken:
        return ScoredToken(self._name(token), logprob, tuple((self._name(each), value) for each, value in top), ends)

    def _name(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)
