"""A policy's rules for one stage, in order: every rule sees the original text, and one decision comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gearshift.guardrails.rules import Rule, make_rule
from gearshift.guardrails.verdict import Action, Finding, Span, Stage, Verdict
from gearshift.platform.config import Policy


@dataclass(frozen=True, slots=True)
class Link:
    rule: Rule
    action: Action


class Chain:
    """Block wins over redact, redact over allow. A rule that raises blocks: what was not checked has not passed."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)

    def check(self, text: str) -> Verdict:
        findings = tuple(finding for link in self.links if (finding := _find(link, text)))
        if any(finding.action == "block" for finding in findings):
            return Verdict("block", "", findings)
        if findings:
            return Verdict("redact", redact(text, findings), findings)
        return Verdict("allow", text)


def _find(link: Link, text: str) -> Finding | None:
    try:
        spans = link.rule.find(text)
    except Exception:
        return Finding(link.rule.name, "block", (Span(0, len(text)),))
    return Finding(link.rule.name, link.action, tuple(spans)) if spans else None


def redact(text: str, findings: Sequence[Finding]) -> str:
    """Puts `[REDACTED:rule]` in the place of each finding; findings that overlap become one, named by the first."""
    spans = sorted((span.start, span.end, finding.rule) for finding in findings for span in finding.spans)
    parts: list[str] = []
    done = 0
    for start, end, rule in spans:
        if start >= done:
            parts += [text[done:start], f"[REDACTED:{rule}]"]
        done = max(done, end)
    return "".join([*parts, text[done:]])


def make_chain(policy: Policy, stage: Stage) -> Chain:
    return Chain([Link(make_rule(rule.rule, rule.terms), rule.action) for rule in policy.rules if stage in rule.stages])
