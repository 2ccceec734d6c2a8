"""A policy's rules for one stage, in order: every rule sees the original text, and one decision comes out."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gearshift.guardrails.documents import Place, escaped, marked, redacted
from gearshift.guardrails.patterns import Rule, places
from gearshift.guardrails.rules import make_rule
from gearshift.guardrails.subject import Subject
from gearshift.guardrails.trained import Trained, make_trained
from gearshift.guardrails.verdict import Action, Fail, Finding, Span, Stage, Verdict
from gearshift.platform.config import NAMED, TRAINED, Policy
from gearshift.platform.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """shadow: only tell what it would do. fail: what to do when it can't run."""

    rule: Rule
    action: Action
    fail: Fail = "closed"
    shadow: bool = False

    def open_from(self, text: str) -> int:
        """As `Rule.open_from`; nothing is open for a rule that can't run: it speaks when it is asked to find."""
        try:
            return min(max(0, self.rule.open_from(text)), len(text))
        except Exception:
            return len(text)


@dataclass(frozen=True, slots=True)
class Judge:
    """As `Link`, of a rule that scores a whole text."""

    rule: Trained
    action: Action = "block"
    fail: Fail = "closed"
    shadow: bool = False
    plain: bool = False
    """Decide by words alone where the vector does not come."""


@dataclass(frozen=True, slots=True)
class Naming:
    """As `Link`, of a rule about what has no form, which the encoder's process finds."""

    kind: str
    action: Action
    fail: Fail = "closed"
    shadow: bool = False


class Chain:
    """Block wins over review, review over redact, redact over allow; what is in the shadow wins over nothing. A rule that can't
    run blocks unless the policy says otherwise: what was not checked has not passed."""

    def __init__(
        self,
        links: Sequence[Link],
        judges: Sequence[Judge] = (),
        max_chars: int | None = None,
        namings: Sequence[Naming] = (),
    ) -> None:
        self.links = tuple(links)
        self.judges = tuple(judges)
        self.max_chars = max_chars
        self.namings = tuple(namings)

    @property
    def reads(self) -> bool:
        """Whether there is any rule."""
        return bool(self.links or self.judges or self.max_chars or self.namings)

    @property
    def rules(self) -> list[str]:
        """The names of all."""
        length = ["length"] if self.max_chars is not None else []
        named = [link.rule.name for link in self.links] + [judge.rule.name for judge in self.judges]
        return list(dict.fromkeys([*named, *(naming.kind for naming in self.namings), *length]))

    def check(self, text: str) -> Verdict:
        """By the rules that find places, in the text as it is: what an answer goes through, piece by piece."""
        return decide(text, self.find(text))

    def find(self, text: str) -> list[Finding]:
        """By the rules that find places."""
        return [found for link in self.links if (found := _find(link, text))]

    def check_whole(self, subject: Subject) -> Verdict:
        """By the rules that find places, in the text as it is and as it reads when its disguise is undone."""
        findings = self.find(subject.text)
        findings += self._hidden(subject.text)
        findings += [found for naming in self.namings if (found := _named(naming, subject))]
        if not self.links:
            return decide(subject.text, findings, self)
        try:
            disguised = subject.view.text != subject.text
        except Exception:  # who can't be read in plain has not been read
            findings += [_failed(link.rule.name, link.fail, link.shadow, len(subject.text)) for link in self.links]
            return decide(subject.text, findings, self)
        if disguised:
            findings += [found for link in self.links if (found := _find_disguised(link, subject))]
        return decide(subject.text, findings, self)

    def places(self, text: str) -> list[Place]:
        """What the rules would take out of a document."""
        found = [*self.find(text), *self._hidden(text)]
        return places_of([each for each in found if each.action == "redact" and not each.shadow])

    def _hidden(self, text: str) -> list[Finding]:
        """In the values of a document (JSON), where escapes hide it."""
        leaves, found = escaped(text), []
        said, written = [leaf.value for leaf in leaves], [text[leaf.start : leaf.end] for leaf in leaves]
        for link in self.links if leaves else ():
            seen, plain = _counts(link, said), _counts(link, written)
            spans = tuple(Span(leaf.start, leaf.end) for at, leaf in enumerate(leaves) if seen[at] > plain[at])
            found += [Finding(link.rule.name, link.action, spans, shadow=link.shadow)] if spans else []
        return found

    def judge(self, subject: Subject) -> list[Finding]:
        """By the rules that score."""
        return [found for judge in self.judges if (found := _judge(judge, subject))]


def decide(text: str, findings: Sequence[Finding], chain: Chain | None = None) -> Verdict:
    """chain: for a whole text, which may be a document and stays one."""
    told = tuple(findings)
    binding = [finding for finding in told if not finding.shadow]
    if any(finding.action == "block" for finding in binding):
        return Verdict("block", "", told)
    redacting = [finding for finding in binding if finding.action == "redact"]
    left = text
    if redacting and chain is not None:
        left = redacted(text, places_of(redacting), chain.places)
    elif redacting:
        left = marked(text, places_of(redacting))
    if any(finding.action == "review" for finding in binding):
        return Verdict("review", left, told)
    return Verdict("redact" if redacting else "allow", left, told)


def _find(link: Link, text: str) -> Finding | None:
    try:
        spans = places(link.rule, text)
    except Exception:
        return _failed(link.rule.name, link.fail, link.shadow, len(text))
    return Finding(link.rule.name, link.action, tuple(spans), shadow=link.shadow) if spans else None


def _counts(link: Link, texts: Sequence[str]) -> Counter[int]:
    """How often the rule finds something in each, by place; all are read at once."""
    found = _find(link, "\n".join(texts))
    starts = list(accumulate((len(text) + 1 for text in texts), initial=0))
    return Counter(bisect_right(starts, span.start) - 1 for span in (found.spans if found else ()))


def _find_disguised(link: Link, subject: Subject) -> Finding | None:
    found = _find(link, subject.view.text)
    if found is None:
        return None
    if found.failed:
        return replace(found, spans=(Span(0, len(subject.text)),))
    return replace(found, spans=tuple(sorted(subject.view.origin(span) for span in found.spans)))


def _named(naming: Naming, subject: Subject) -> Finding | None:
    if subject.entities is None:
        return _failed(naming.kind, naming.fail, naming.shadow, len(subject.text))
    spans = tuple(Span(each.start, each.end) for each in subject.entities if each.kind == naming.kind)
    return Finding(naming.kind, naming.action, spans, shadow=naming.shadow) if spans else None


def _judge(judge: Judge, subject: Subject) -> Finding | None:
    whole, plain = (Span(0, len(subject.text)),), False
    try:
        score = judge.rule.score(subject)
        if score is None and judge.plain:
            score, plain = judge.rule.score(Subject(subject.text)), True
    except Exception:
        score = None
    if score is None:
        return _failed(judge.rule.name, judge.fail, judge.shadow, len(subject.text))
    if score >= judge.rule.threshold:
        return Finding(judge.rule.name, judge.action, whole, score, judge.shadow, plain=plain)
    return Finding(judge.rule.name, "allow", (), score, judge.shadow, plain=True) if plain else None


def _failed(rule: str, fail: Fail, shadow: bool, length: int) -> Finding:
    return Finding(rule, "allow" if fail == "open" else "block", (Span(0, length),), shadow=shadow, failed=True)


def places_of(findings: Sequence[Finding]) -> list[Place]:
    return [Place(span.start, span.end, finding.rule) for finding in findings for span in finding.spans]


def make_chain(policy: Policy, stage: Stage, encoder: str = "") -> Chain:
    """encoder: whose vectors trained rules will get. Raises `ConfigError`."""
    rules = [rule for rule in policy.rules if stage in rule.stages]
    found = [rule for rule in rules if rule.rule not in (*TRAINED, *NAMED, "length")]
    links = [Link(make_rule(rule.rule, rule.terms, stage), rule.action, rule.fail, rule.shadow) for rule in found]
    judges = [
        Judge(make_trained(rule, encoder), rule.action, rule.fail, rule.shadow, rule.without_vector == "plain")
        for rule in rules
        if rule.rule in TRAINED
    ]
    namings = [Naming(rule.rule, rule.action, rule.fail, rule.shadow) for rule in rules if rule.rule in NAMED]
    if namings and not encoder:
        raise ConfigError(f"the rule {namings[0].kind} reads with the encoder: say `embedding: {{}}` in the config")
    most = min((rule.max_chars for rule in rules if rule.max_chars is not None), default=None)
    return Chain(links, judges, most, namings)
