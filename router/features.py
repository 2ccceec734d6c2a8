"""What can be counted in a query, as numbers for a trained scorer. Pure, about a tenth of a millisecond."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gearshift.router.answers import Attempt

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)?")
_OPERATOR = re.compile(r"[-+*/^=<>%×÷]")
_SENTENCE = re.compile(r"[.?!\n]")
_NEGATION = re.compile(r"\b(?:not|except|false|least|never|incorrect)\b", re.I)
_ASKS = re.compile(r"\b(?:which|what|who|when|where)\b", re.I)
_COMPUTES = re.compile(r"\b(?:how many|how much|calculate|find|compute|probability|solve)\b", re.I)
_REASONS = re.compile(r"\b(?:why|prove|explain|compare|derive|design|step by step)\b", re.I)
_QUANTITY = re.compile(r"\b(?:per|each|every|half|twice|third|percent|times|more|less|than|if|then)\b", re.I)
_CODE = re.compile(
    r"```|\bdef \w+\(|\bclass \w+|[{};]\s*$|\b(?:python|javascript|java|rust|sql|regex|bash)\b", re.I | re.M
)
_CHOICE = re.compile(r"\n\(?[A-J][.):] ")
_ALL_OR_NONE = re.compile(r"\b(?:all of the above|none of the above|both)\b", re.I)
_TRUTH = re.compile(r"\b(?:true|false|wrong)\b", re.I)
_PERSON = re.compile(r"\b(?:I|he|she|my|me)\b")
_NAME = re.compile(r"\b[A-Z][a-z]+")
_MATHS = re.compile(r"[=^∫√π\\]")
_CONSTRAINT = re.compile(
    r"\b(?:must|exactly|at least|at most|without|only|no more than|format|json|table|list)\b", re.I
)


@dataclass(frozen=True, slots=True)
class Query:
    """What a scorer may look at. `embedding` is the request's shared one, empty when nothing made one."""

    text: str
    turns: int = 1
    tools: bool = False
    embedding: tuple[float, ...] = ()
    attempt: Attempt | None = None
    """What the cheap tier answered, for a judge of answers."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A query, cut up once."""

    query: Query
    text: str
    words: list[str]
    numbers: list[str]
    operators: int
    asked: str
    """The text before its choices."""
    choices: list[str]
    """Of a question with lettered choices; one empty text for any other."""

    @property
    def choice_words(self) -> list[int]:
        return [len(choice.split()) for choice in self.choices]


_FEATURES: Mapping[str, Callable[[_Seen], float]] = {
    "words": lambda q: math.log1p(len(q.words)),
    "characters": lambda q: math.log1p(len(q.text)),
    "word length": lambda q: sum(map(len, q.words)) / (len(q.words) or 1),
    "different words": lambda q: len({word.lower() for word in q.words}) / (len(q.words) + 1),
    "longest sentence": lambda q: math.log1p(max(map(len, _SENTENCE.split(q.text)))),
    "lines": lambda q: math.log1p(q.text.count("\n")),
    "commas": lambda q: math.log1p(q.text.count(",")),
    "full stops": lambda q: math.log1p(q.text.count(".")),
    "question marks": lambda q: min(3.0, q.text.count("?")),
    "capitals": lambda q: sum(map(str.isupper, q.text)) / (len(q.text) + 1),
    "other scripts": lambda q: float(not q.text.isascii()),
    "digits": lambda q: sum(map(str.isdigit, q.text)) / (len(q.text) + 1),
    "numbers": lambda q: math.log1p(len(q.numbers)),
    "operators": lambda q: math.log1p(q.operators),
    "operators a word": lambda q: q.operators / (len(q.words) + 1),
    "money": lambda q: float("$" in q.text),
    "formula": lambda q: float("\\" in q.text or "_" in q.text),
    "quantities": lambda q: math.log1p(len(_QUANTITY.findall(q.text))),
    "negation": lambda q: float(bool(_NEGATION.search(q.text))),
    "asks": lambda q: float(bool(_ASKS.search(q.text))),
    "computes": lambda q: float(bool(_COMPUTES.search(q.text))),
    "reasons": lambda q: float(bool(_REASONS.search(q.text))),
    "code": lambda q: math.log1p(len(_CODE.findall(q.text))),
    "constraints": lambda q: math.log1p(len(_CONSTRAINT.findall(q.text))),
    "words asked": lambda q: math.log1p(len(q.asked.split())),
    "share asked": lambda q: len(q.asked) / (len(q.text) + 1),
    "words a choice": lambda q: sum(q.choice_words) / len(q.choices),
    "longest choice": lambda q: float(max(q.choice_words)),
    "shortest choice": lambda q: float(min(q.choice_words)),
    "choices with digits": lambda q: sum(any(map(str.isdigit, choice)) for choice in q.choices) / len(q.choices),
    "choices like the question": lambda q: _shared(q.choices, q.asked),
    "choices of all or none": lambda q: float(bool(_ALL_OR_NONE.search(" ".join(q.choices)))),
    "choices of truth": lambda q: float(bool(_TRUTH.search(" ".join(q.choices)))),
    "statements": lambda q: float("Statement 1" in q.asked),
    "to complete": lambda q: float("___" in q.asked or q.asked.rstrip().endswith((":", "_"))),
    "ends in a question": lambda q: float(q.asked.rstrip().endswith("?")),
    "persons": lambda q: float(bool(_PERSON.search(q.asked))),
    "names": lambda q: len(_NAME.findall(q.asked)) / (1 + len(q.words)),
    "symbols of mathematics": lambda q: float(bool(_MATHS.search(q.text))),
    "turns": lambda q: math.log1p(q.query.turns),
    "tools": lambda q: float(q.query.tools),
}
NAMES = tuple(_FEATURES)


def _shared(choices: list[str], asked: str) -> float:
    """Words of the choices that the question has too, a word of the question."""
    words = asked.lower().split()
    return len(set(" ".join(choices).lower().split()) & set(words)) / (1 + len(words))


def features(query: Query) -> NDArray[np.float64]:
    """[len(NAMES)]"""
    text = query.text
    asked, *choices = _CHOICE.split(text)
    seen = _Seen(
        query, text, _WORD.findall(text), _NUMBER.findall(text), len(_OPERATOR.findall(text)), asked, choices or [""]
    )
    return np.array([feature(seen) for feature in _FEATURES.values()])
