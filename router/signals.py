"""What can be seen of a query at no cost: counts and marks, as numbers. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"\w+")
_OPERATOR = re.compile(r"\d\s*[-+*/^=<>%×÷]\s*\d|[∑∫√≤≥≠]|\\frac|\\sum")
_CODE = re.compile(
    r"```|\bdef \w+\(|\bclass \w+|[{};]\s*$|"
    r"\b(?:python|javascript|typescript|java|rust|golang|c\+\+|sql|regex|bash)\b",
    re.I | re.M,
)
_REASONING = re.compile(
    r"\b(?:why|prove|proof|derive|explain|compare|analy[sz]e|design|implement|optimi[sz]e|debug|refactor|complexity|algorithm|"
    r"step by step|trade-?offs?|function|recursive|theorem|integral|derivative|probability|equation|solve)\b",
    re.I,
)
_CONSTRAINT = re.compile(
    r"\b(?:must|exactly|at least|at most|without using|only use|no more than|between|each|format|json|table|constraints?)\b",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Signals:
    words: int
    digits: int
    operators: int
    code: int
    reasoning: int
    constraints: int
    turns: int


def signals(text: str, turns: int = 1) -> Signals:
    return Signals(
        words=len(_WORD.findall(text)),
        digits=sum(character.isdigit() for character in text),
        operators=len(_OPERATOR.findall(text)),
        code=len(_CODE.findall(text)),
        reasoning=len(_REASONING.findall(text)),
        constraints=len(_CONSTRAINT.findall(text)),
        turns=turns,
    )
