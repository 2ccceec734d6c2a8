"""The output guardrail on a stream: no character leaves before its verdict.

Text is held back only where it may still become part of a finding: the last word, a run of digits, the beginning of a
listed term. So most text waits for the end of its word and no longer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

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


async def watch(
    deltas: AsyncGenerator[Delta, None], chain: Chain, note: Callable[[Verdict], None]
) -> AsyncGenerator[Delta, None]:
    """Passes on what the chain allows. A block ends the stream with `content_filter`, and closes what is below."""
    window = Window(chain)
    async with aclosing(deltas):
        async for delta in deltas:
            verdict = window.push(delta.text)
            text = verdict.text
            if delta.finish_reason and verdict.action != "block":
                rest = window.flush()
                text += rest.text
                if rest.findings:
                    note(rest)
                verdict = rest if rest.action == "block" else verdict
            if verdict.findings:
                note(verdict)
            if verdict.action == "block":
                yield Delta(text, "content_filter", delta.usage)
                return
            if text or delta.finish_reason:
                if not chain.links:  # nothing is ever held back: text and tokens go together
                    yield delta
                else:
                    yield Delta(text, delta.finish_reason, delta.usage)
