"""The output guardrail on a stream: no character leaves before its verdict.

Text is held back only where it may still become part of a finding: the last word, a run of digits, the beginning of a
listed term. So most text waits for the end of its word and no longer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from gearshift.guardrails.chain import Chain, decide
from gearshift.guardrails.verdict import Finding, Span, Verdict
from gearshift.platform.request import Delta

WINDOW_CHARS = 256
"""Longest run that is held when nothing was found in it. Every pattern shows itself within fewer characters."""

KEPT = 196
"""Characters of the beginning of a finding that are kept while it grows: more than what comes before any unbounded part."""


class Window:
    """Sans I/O: text goes in, text that may be sent comes out."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._held = ""

    @property
    def held(self) -> int:
        """Characters that wait for what follows them."""
        return len(self._held)

    def push(self, text: str) -> Verdict:
        self._held += text
        if not self._chain.links:
            return self._release(len(self._held), [])
        return self._decide()

    def flush(self) -> Verdict:
        return self._release(len(self._held), self._chain.find(self._held))

    def _decide(self) -> Verdict:
        """Releases what can be decided now. A rule that can't run and must not be skipped decides at once: it blocks."""
        text, findings = self._held, self._chain.find(self._held)
        if any(finding.failed and finding.action == "block" and not finding.shadow for finding in findings):
            return self._release(len(text), findings)
        opened = min((link.open_from(text) for link in self._chain.links), default=len(text))
        # a run longer than anything undecided needs lets go of its beginning
        end = max(opened, len(text) - WINDOW_CHARS)
        found = [span for finding in findings if not finding.failed for span in finding.spans]
        for span in sorted(found, reverse=True):  # never cut into a finding, nor let go of one that may still grow
            if span.start < end and (span.end > end or span.end >= opened):
                end = span.start
        verdict = self._release(end, findings)
        if len(self._held) > WINDOW_CHARS:
            self._held = self._shortened(self._held)
        return verdict

    def _shortened(self, text: str) -> str:
        """Without the middle of a finding that grows on and on: its unbounded part is all of one kind, so that what is left says
        the same. Only the mark will ever leave, not the text."""
        excess = len(text) - WINDOW_CHARS
        shorter = text[:KEPT] + text[KEPT + excess :]

        def moved(at: int) -> int:
            return at - excess if at > KEPT else at

        before = [(each.rule, [(moved(s), moved(e)) for s, e in each.spans]) for each in self._chain.find(text)]
        after = [(each.rule, list(each.spans)) for each in self._chain.find(shorter)]
        return shorter if before == after else text

    def _release(self, end: int, findings: Sequence[Finding]) -> Verdict:
        """findings: in all that is held. What is let go of was looked at together with what follows it."""
        text, self._held = self._held[:end], self._held[end:]
        return decide(text, [part for finding in findings if (part := _before(finding, end)) is not None])


def _before(finding: Finding, end: int) -> Finding | None:
    if finding.failed:
        return replace(finding, spans=(Span(0, end),))
    spans = tuple(span for span in finding.spans if span.end <= end)
    return replace(finding, spans=spans) if spans else None


class Kept(NamedTuple):
    """What became of an answer that a human is to look at."""

    ticket: str
    approved: bool


Hold = Callable[[str, str, Delta], Awaitable[Kept]]
"""Rule, answer, and its last piece."""


async def watch(
    deltas: AsyncGenerator[Delta, None], chain: Chain, note: Callable[[Verdict], None], hold: Hold | None = None
) -> AsyncGenerator[Delta, None]:
    """Passes on what the chain allows. A block ends the stream with `content_filter`, and closes what is below. What a human has
    to look at is held back to its end, together with all that follows; without `hold` it is blocked."""
    window, answer, rule = Window(chain), Answer(), ""
    async with aclosing(deltas):
        async for delta in deltas:
            first = window.push(delta.text)
            if not (first.findings or delta.finish_reason or rule):  # nearly all of them
                answer.add(first.text)
                if not chain.links:  # nothing is ever held back: text and tokens go together
                    yield delta
                elif first.text:
                    yield Delta(first.text)
                continue
            verdicts = [first]
            if delta.finish_reason and first.action != "block":
                verdicts.append(window.flush())
            for verdict in verdicts:
                if verdict.findings:
                    note(verdict)
            actions = {verdict.action: verdict.rule for verdict in verdicts}
            if "block" in actions or ("review" in actions and hold is None):
                passed = "".join(verdict.text for verdict in verdicts if verdict.action in ("allow", "redact"))
                yield Delta("" if rule else passed, "content_filter", delta.usage)
                return
            text = "".join(verdict.text for verdict in verdicts)
            rule = rule or actions.get("review", "")
            answer.add(text, waits=bool(rule))
            if not rule:
                if text or delta.finish_reason:
                    yield Delta(text, delta.finish_reason, delta.usage) if chain.links else delta
            elif delta.finish_reason and hold is not None:
                yield answer.end(delta, await hold(rule, answer.text, delta))


class Answer:
    """What was let go of, and what waits for a human."""

    def __init__(self) -> None:
        self._passed: list[str] = []
        self._waiting: list[str] = []

    @property
    def text(self) -> str:
        return "".join((*self._passed, *self._waiting))

    def add(self, text: str, waits: bool = False) -> None:
        (self._waiting if waits else self._passed).append(text)

    def end(self, last: Delta, kept: Kept) -> Delta:
        if kept.approved:
            return Delta("".join(self._waiting), last.finish_reason, last.usage)
        return Delta("", "content_filter", last.usage, ticket=kept.ticket)
