"""What can be measured of a request. Each score is a plug-in: a pure function of the sample, with "unscored" for an answer."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from gearshift.platform.samples import Feedback, Sample
from gearshift.router.answers import refuses, repeats

Kind = Literal["rate", "mean", "p95", "preference"]
"""A preference is of pairs, an arm's answer beside the baseline's to the same question: a half where neither is better."""
_CONTENT = re.compile(r"\b(?:\d[\d.,]*\d|\d|\w{5,})\b")
_FENCE = re.compile(r"\A```(?:json)?\s*|\s*```\Z")


@dataclass(frozen=True, slots=True)
class Score:
    """value: None when the sample can't be scored, and then `label` says why."""

    value: float | None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """How a score is compared between arms. Scores of a rate are in 0 to 1."""

    kind: Kind
    better: Literal["higher", "lower"]
    score: Callable[[Sample], Score]
    unit: str = ""


NO_TEXT = Score(None, "no text")
NO_ANSWER = Score(None, "no answer")


def error(sample: Sample) -> Score:
    """The client got an error that was ours. One that went away, or asked for nonsense, is none."""
    return Score(float(sample.status >= 500), sample.error)


def empty(sample: Sample) -> Score:
    return _of_text(sample, lambda answer: not answer.strip())


def refusal(sample: Sample) -> Score:
    return _of_text(sample, refuses)


def loop(sample: Sample) -> Score:
    """It says the same again and again."""
    return _of_text(sample, repeats)


def truncated(sample: Sample) -> Score:
    if sample.status != 200:
        return NO_ANSWER
    return Score(float(sample.finish_reason == "length"))


def language(sample: Sample) -> Score:
    """The answer is in another script than the question."""
    asked, told = script(sample.question), script(sample.answer)
    if not sample.has_text or asked is None or told is None:
        return NO_TEXT if not sample.has_text else Score(None, "too few letters")
    return Score(float(asked != told), f"{asked} to {told}")


def json_valid(sample: Sample) -> Score:
    """Where JSON was asked for, it is JSON."""
    if not sample.wants_json:
        return Score(None, "no JSON asked for")
    return _of_text(sample, _is_json)


def valid(sample: Sample) -> Score:
    """An answer at all, and none of the faults above: what a reader sees at a glance."""
    if sample.status != 200:
        return NO_ANSWER
    for name, fault in _FAULTS.items():
        if fault(sample).value:
            return Score(0.0, name)
    if sample.wants_json and json_valid(sample).value == 0.0:
        return Score(0.0, "json")
    return Score(1.0) if sample.has_text else NO_TEXT


def grounded(sample: Sample) -> Score:
    """Share of the answer's numbers and long words that the retrieved text has; a proxy without a model."""
    if not sample.has_text or not sample.context:
        return Score(None, "no retrieved text")
    told = {word.lower() for word in _CONTENT.findall(sample.answer)}
    if not told:
        return Score(None, "nothing to check")
    known = {word.lower() for word in _CONTENT.findall(sample.context + " " + sample.question)}
    return Score(len(told & known) / len(told))


def blocked(sample: Sample) -> Score:
    return Score(float(sample.blocked))


def feedback_value(feedback: Feedback) -> Score:
    """What the user said; a correction alone says that the answer was wrong."""
    if feedback.value is not None:
        return Score(feedback.value)
    return Score(0.0, "corrected") if feedback.correction else Score(None, "only a comment")


def script(text: str) -> str | None:
    """The writing system of most letters; None for fewer than eight letters."""
    letters = [char for char in text if char.isalpha()]
    if len(letters) < 8:
        return None
    kinds = Counter(unicodedata.name(char, "?").split()[0] for char in letters)
    return kinds.most_common(1)[0][0].lower()


def _is_json(answer: str) -> bool:
    try:
        json.loads(_FENCE.sub("", answer.strip()))
    except ValueError:
        return False
    return True


def _of_text(sample: Sample, holds: Callable[[str], bool]) -> Score:
    if sample.status != 200:
        return NO_ANSWER
    return Score(float(holds(sample.answer))) if sample.has_text else NO_TEXT


def _number(of: Callable[[Sample], float | None]) -> Callable[[Sample], Score]:
    """Of answers that an engine made."""

    def score(sample: Sample) -> Score:
        value = of(sample) if sample.status == 200 and sample.cache != "hit" else None
        return Score(value) if value is not None else NO_ANSWER

    return score


def _comes_later(_: Sample) -> Score:
    return Score(None, "comes later")


_FAULTS: Mapping[str, Callable[[Sample], Score]] = {
    "empty": empty,
    "refusal": refusal,
    "loop": loop,
    "language": language,
}

MEASURES: Mapping[str, Measured] = {
    "error": Measured("rate", "lower", error),
    "valid": Measured("rate", "higher", valid),
    "empty": Measured("rate", "lower", empty),
    "refusal": Measured("rate", "lower", refusal),
    "loop": Measured("rate", "lower", loop),
    "truncated": Measured("rate", "lower", truncated),
    "language": Measured("rate", "lower", language),
    "json": Measured("rate", "higher", json_valid),
    "feedback": Measured("rate", "higher", _comes_later),
    "grounded": Measured("rate", "higher", grounded),
    "blocked": Measured("rate", "lower", blocked),
    "preferred": Measured("preference", "higher", _comes_later),
    "canary": Measured("rate", "higher", _comes_later),
    "ttft_p95": Measured("p95", "lower", _number(lambda s: s.ttft_s), "s"),
    "inter_token_p95": Measured("p95", "lower", _number(lambda s: s.inter_token_s), "s"),
    "duration_p95": Measured("p95", "lower", _number(lambda s: s.duration_s), "s"),
    "cost": Measured("mean", "lower", _number(lambda s: s.cost_dollars), "$"),
    "answer_tokens": Measured("mean", "lower", _number(lambda s: float(s.completion_tokens))),
}
"""By the names that the config knows; and `canary`, which belongs to releases and not to requests."""
LATER = frozenset({"feedback", "preferred", "canary"})
"""Scores that are not made from the sample."""
