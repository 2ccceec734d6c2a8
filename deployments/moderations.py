"""`POST /v1/moderations`: a policy's input rules for anyone who asks, in OpenAI's form; its categories are the policy's rules."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gearshift.guardrails.policy import Reading
from gearshift.guardrails.subject import Entities, Vectors
from gearshift.guardrails.verdict import Stage
from gearshift.platform.errors import GuardrailAway
from gearshift.platform.openai import parse_as
from gearshift.platform.request import JsonObject, Message

MAX_INPUTS = 32


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextInput(_Wire):
    type: Literal["text"]
    text: str


class ModerationBody(_Wire):
    """Of several texts each is judged on its own; parts (`{"type": "text"}`) are one text."""

    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[TextInput], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    model: str | None = None
    """A tier or release, whose policy is asked; unset is the first tier's."""

    @property
    def texts(self) -> list[str]:
        if isinstance(self.input, str):
            return [self.input]
        parts = [part.text for part in self.input if isinstance(part, TextInput)]
        return ["\n".join(parts)] if parts else [text for text in self.input if isinstance(text, str)]


def parse_moderation(body: bytes) -> ModerationBody:
    """Raises `InvalidRequest`."""
    return parse_as(ModerationBody, body)


def messages(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def result(reading: Reading, vectors: Vectors | None, entities: Entities) -> JsonObject:
    """Raises `GuardrailAway` for a rule that could not run and must not be skipped."""
    _, verdicts = reading.check(vectors, entities)
    findings = [finding for verdict in verdicts for finding in verdict.findings]
    away = next((each for each in findings if each.failed and each.action == "block" and not each.shadow), None)
    if away is not None:
        raise GuardrailAway(f"The rule {away.rule!r} could not run; try again.")
    spoke = {finding.rule for finding in findings if finding.action != "allow"}
    failed = {finding.rule for finding in findings if finding.failed}
    names = [name for name in reading.rules if name not in failed]  # what did not run is not told as passed
    scores = reading.scores(vectors)
    return {
        "flagged": any(not finding.shadow and finding.action != "allow" for finding in findings),
        "categories": {name: name in spoke for name in names},
        "category_scores": {name: round(scores.get(name, float(name in spoke)), 4) for name in names},
        "category_applied_input_types": {name: ["text"] for name in names},
    }


def moderation(policy: str, results: Sequence[JsonObject]) -> JsonObject:
    """policy: its name and version."""
    return {"id": f"modr-{uuid.uuid4().hex}", "model": policy, "results": list(results)}


def verdicts_object(
    policy: str, asked: Sequence[str], answered: Sequence[str], notes: Sequence[tuple[str, str, str]]
) -> JsonObject:
    """OpenAI's `moderation` of a completion: which rules of either stage spoke. notes: stage, rule and action."""

    def side(stage: Stage, rules: Sequence[str]) -> JsonObject:
        spoke = {rule: action for at, rule, action in notes if at == stage and action not in ("allow", "failed_open")}
        ran = [rule for rule in rules if not spoke.get(rule, "").startswith("failed")]
        result = {
            "type": "moderation_result",
            "model": policy,
            "flagged": any(not action.startswith(("would_", "allow")) for action in spoke.values()),
            "categories": {rule: rule in spoke for rule in ran},
            "category_scores": {rule: float(rule in spoke) for rule in ran},
            "category_applied_input_types": {rule: ["text"] for rule in ran},
        }
        return {"type": "moderation_results", "model": policy, "results": [result]}

    return {"input": side("input", asked), "output": side("output", answered)}
