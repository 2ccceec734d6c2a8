"""A policy of the config, ready to run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gearshift.guardrails.chain import Chain, decide, make_chain
from gearshift.guardrails.subject import Entities, Subject, Vectors
from gearshift.guardrails.tagger import tagger_of
from gearshift.guardrails.verdict import Finding, Span, Verdict
from gearshift.platform.config import NAMED, Config, Policy
from gearshift.platform.errors import ConfigError
from gearshift.platform.request import Message

JUDGED = ("user", "tool")
"""Roles whose words are judged: what the product's own developers and the model wrote is not an attack on it."""
OWN = ("system", "developer")
"""Roles whose words are the product's own: names in them are no secret of anybody's."""
JOINED = 4
"""The last so many messages of the user are also read as one: a payload may be split over them."""


REMEMBERED = 512
"""Requests whose verdicts are kept, of at most `REMEMBERED_CHARS`: what is asked again and again is read once."""
REMEMBERED_CHARS = 8000
Checked = tuple[tuple[Message, ...], list[Verdict]]
"""The messages with redactions made, and the verdicts that say something."""


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    input: Chain
    output: Chain
    _known: OrderedDict[tuple[Message, ...], Checked] = field(default_factory=OrderedDict)

    def reading(self, messages: Sequence[Message]) -> Reading:
        return Reading(self.input, messages)

    def known(self, messages: tuple[Message, ...]) -> Checked | None:
        """What was said of the very same messages before."""
        if (found := self._known.get(messages)) is not None:
            self._known.move_to_end(messages)
        return found

    def remember(self, messages: tuple[Message, ...], checked: Checked) -> None:
        """Not what was said without a rule, or without the vector that it asked for: the next time it may be there."""
        findings = (finding for verdict in checked[1] for finding in verdict.findings)
        if any(finding.failed or finding.plain for finding in findings):
            return
        if sum(len(message.content) for message in messages) <= REMEMBERED_CHARS:
            self._known[messages] = checked
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)


class Reading:
    """One request under the input rules. Ask `doubtful` first, then give `check` the vectors."""

    def __init__(self, chain: Chain, messages: Sequence[Message]) -> None:
        self._chain = chain
        self._messages = tuple(messages)
        self._subjects = [Subject(message.content) for message in messages]
        self._judged = self._to_judge() if chain.judges else []

    def _to_judge(self) -> list[Subject]:
        pairs = list(zip(self._messages, self._subjects, strict=True))
        asked = [message.content for message in self._messages if message.role == "user"][-JOINED:]
        joined = [Subject("\n".join(asked))] if len(asked) > 1 else []
        return [subject for message, subject in pairs if message.role in JUDGED] + joined

    def doubtful(self) -> list[str]:
        """Texts whose vectors the rules need; each once."""
        rules = [judge.rule for judge in self._chain.judges]
        return list(
            dict.fromkeys(text for subject in self._judged for rule in rules for text in rule.doubtful(subject))
        )

    def to_name(self) -> list[str]:
        """Texts of which the rules need to know what they name; each once."""
        if not self._chain.namings:
            return []
        return list(dict.fromkeys(message.content for message in self._messages if message.role not in OWN))

    def check(self, vectors: Vectors | None = None, entities: Entities | None = None) -> Checked:
        """vectors: None where no encoder runs. entities: of the texts in `to_name`."""
        told = entities or {}
        verdicts = [verdict for verdict in (self._length(), self._judge(vectors)) if verdict.findings]
        checked: list[Message] = []
        for message, subject in zip(self._messages, self._subjects, strict=True):
            subject.entities = () if message.role in OWN else told.get(subject.text)
            verdict = self._chain.check_whole(subject)
            if verdict.findings:
                verdicts.append(verdict)
            passed = verdict.action == "block" or verdict.text == message.content
            checked.append(message if passed else replace(message, content=verdict.text))
        return tuple(checked), verdicts

    @property
    def rules(self) -> list[str]:
        """The names of all rules that read this."""
        return self._chain.rules

    def scores(self, vectors: Vectors | None = None) -> dict[str, float]:
        """What each trained rule makes of all that is judged, 0 to 1, whatever its threshold; without those that can't tell."""
        found: dict[str, float] = {}
        for subject in self._judged:
            subject.vectors = vectors
            for judge in self._chain.judges:
                if (score := judge.rule.score(subject)) is not None:
                    found[judge.rule.name] = max(score, found.get(judge.rule.name, 0.0))
        return found

    def _length(self) -> Verdict:
        most, length = self._chain.max_chars, sum(len(subject.text) for subject in self._subjects)
        if most is None or length <= most:
            return Verdict("allow", "")
        return decide("", [Finding("length", "block", (Span(most, length),))])

    def _judge(self, vectors: Vectors | None) -> Verdict:
        """Of all that is judged; each rule speaks once, where it is surest."""
        found: dict[str, Finding] = {}
        for subject in self._judged:
            subject.vectors = vectors
            for finding in self._chain.judge(subject):
                known = found.get(finding.rule)
                if known is None or (finding.score or 0.0) > (known.score or 0.0):
                    found[finding.rule] = finding
        return decide("", list(found.values()))


def compile_policies(config: Config, vectors: bool = True) -> dict[str, CompiledPolicy]:
    """vectors: whether those of `embedding` can be had. Raises `ConfigError` that names the policy."""
    encoder = config.embedding.source if vectors and config.embedding is not None else ""
    if config.embedding is not None and any(
        rule.rule in NAMED for policy in config.policies.values() for rule in policy.rules
    ):
        tagger_of(config.embedding)
    compiled = {}
    for name, policy in config.policies.items():
        try:
            compiled[name] = compile_policy(policy, encoder)
        except ConfigError as error:
            raise ConfigError(f"policies.{name}: {error}") from error
    return compiled


def compile_policy(policy: Policy, encoder: str = "") -> CompiledPolicy:
    """encoder: of the deployment, empty for none. Raises `ConfigError`."""
    return CompiledPolicy(make_chain(policy, "input", encoder), make_chain(policy, "output"))
