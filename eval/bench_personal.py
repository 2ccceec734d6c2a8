"""Part of `gearshift bench guardrails`: personal data, entity by entity."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from gearshift.eval.bench import Bar, Report, collect
from gearshift.eval.tagger_training import (
    NAMED,
    Quality,
    States,
    Text,
    as_spans,
    inputs_of,
    quality,
    read,
    silence,
    tagged,
    unseen_scores,
)
from gearshift.guardrails.chain import make_chain
from gearshift.guardrails.rules import make_rule
from gearshift.guardrails.subject import Subject
from gearshift.guardrails.tagger import Entity
from gearshift.guardrails.verdict import Span
from gearshift.platform.config import Policy

FORMED = {
    "email": "EMAIL_ADDRESS",
    "card": "CREDIT_CARD",
    "phone": "PHONE_NUMBER",
    "iban": "IBAN_CODE",
    "ssn": "US_SSN",
    "ip": "IP_ADDRESS",
}
"""Rules for personal data with a form, and what presidio-research calls it."""
OVER = 0.02
"""Share of harmless characters that names and the like may be taken for, when the amount of silence is chosen."""


def bench_personal(folder: Path, states: States, report: Report, progress: Callable[[str, int, int], None]) -> None:
    """Rules with a form as they are; the others by taggers that saw no text of the same template."""
    texts = read(folder)
    formed = [[(span, name) for name in FORMED for span in make_rule(name, (), "input").find(t.text)] for t in texts]
    _formed(texts, formed, report)
    progress("taggers", 0, 1)
    _documents(texts, report)
    scores = unseen_scores(texts, inputs_of(texts, states))
    amount, _ = silence(texts, scores, OVER)
    progress("taggers", 1, 1)
    found = [_together(form, named) for form, named in zip(formed, tagged(texts, scores, amount), strict=True)]
    reached = quality(texts, found, {label: name for name, label in FORMED.items()} | NAMED)
    _tell("everything", reached, report)
    report.bars += [
        Bar("personal: everything: F1", reached.f1, 0.65, "min"),
        Bar("personal: everything: F1 with the very same ends", reached.exact_f1, 0.65, "min"),
        Bar("personal: labelled characters that leak", reached.leaked, 0.20, "max"),
        Bar("personal: other characters taken out", reached.over, 0.03, "max"),
    ]


def _documents(texts: list[Text], report: Report) -> None:
    """Arguments of tools made of the texts, as they are and within a string: JSON with the same keys afterwards?"""
    rules = [{"rule": name} for name in ("secrets", *FORMED)]
    chain, whole, changed = make_chain(Policy.model_validate({"rules": rules}), "input"), 0, 0
    for number, each in enumerate(texts):
        inner = {"text": each.text, "more": {"list": [each.text[::-1], number, 4111111111111111]}}
        made = json.dumps(
            {"name": "send", "plain": inner, "arguments": json.dumps(inner)}, ensure_ascii=number % 2 == 0
        )
        left = chain.check_whole(Subject(made)).text
        changed += left != made
        try:
            found = json.loads(left)
            whole += [_keys(found["plain"]), _keys(json.loads(found["arguments"]))] == [_keys(inner)] * 2
        except ValueError:
            continue
    report.results.append(collect("documents: with something taken out", "%", [100 * changed / len(texts)]))
    report.bars.append(Bar("documents: still JSON, with the same keys, %", 100 * whole / len(texts), 100, "min"))


def _keys(value: object) -> object:
    if isinstance(value, dict):
        return {key: _keys(each) for key, each in value.items()}
    return [_keys(each) for each in value] if isinstance(value, list) else None


def _together(formed: list[tuple[Span, str]], named: list[Entity]) -> list[tuple[Span, str]]:
    """What has a form is that: a name that overlaps it says nothing new."""
    free = [
        each
        for each in as_spans(named)
        if not any(one.start < each[0].end and each[0].start < one.end for one, _ in formed)
    ]
    return formed + free


def _formed(texts: list[Text], found: list[list[tuple[Span, str]]], report: Report) -> None:
    labels = {label: name for name, label in FORMED.items()}
    asked = [Text(t.text, t.places, [each for each in t.spans if each[1] in labels], t.group) for t in texts]
    for label, name in labels.items():
        mine = [Text(t.text, t.places, [each for each in t.spans if each[1] == label], t.group) for t in texts]
        reached = quality(mine, [[each for each in row if each[1] == name] for row in found], labels)
        _tell(name, reached, report)
        if name == "phone":
            report.bars.append(Bar("personal: phone: recall", reached.recall, 0.85, "min"))
    reached = quality(asked, found, labels)
    report.results.append(collect("personal: all with a form: F1", "", [reached.f1]))
    report.bars.append(Bar("personal: all with a form: F1", reached.f1, 0.95, "min"))


def _tell(name: str, reached: Quality, report: Report) -> None:
    figures = {"precision": reached.precision, "recall": reached.recall}
    if name == "everything":
        figures |= {"F1": reached.f1, "F1 with the very same ends": reached.exact_f1}
        figures |= {"labelled characters that leak": reached.leaked, "other characters taken out": reached.over}
    report.results += [collect(f"personal: {name}: {key}", "%", [100 * value]) for key, value in figures.items()]
