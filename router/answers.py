"""What an answer of the cheap tier tells about itself, for the cascade. Pure.

FrugalGPT (Chen et al. 2023, arXiv 2305.05176, section 3) scores the answer's text; AutoMix (Madaan et al. 2023, arXiv
2310.12963) lets the model check itself. Here the model's own token probabilities are read, which cost nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gearshift.router.features import Query

FIRST = 8
"""Tokens whose entropy says how sure the model was where to begin."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_EQUATION = re.compile(r"([\d.,$%\s]+(?:[-+*/x×][\d.,$%\s]+)+)=\s*\$?([\d.,]+\d|\d)")
_TERM = re.compile(r"([-+*/x×])|(\d[\d,]*(?:\.\d+)?)(%?)")
_MARK = re.compile(r"[#*|`]+")
_BRACKET = re.compile(r"[<({\[]+")
_END = re.compile(r"\d[\s.$%)*]*$")
_REFUSAL = re.compile(
    r"\b(?:I(?:'m| am) (?:sorry|unable|not able)|I (?:can(?:'|no)t|do(?:n't| not) (?:know|have))|as an AI)\b", re.I
)


@dataclass(frozen=True, slots=True)
class Certainty:
    """Of one answer. logprobs: natural logarithms of each chosen token's probability; entropies: nats, of the first tokens."""

    logprobs: Sequence[float] = ()
    entropies: Sequence[float] = ()

    @property
    def mean(self) -> float:
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else 0.0

    @property
    def least(self) -> float:
        return min(self.logprobs, default=0.0)

    @property
    def entropy(self) -> float:
        first = self.entropies[:FIRST]
        return sum(first) / len(first) if first else 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """An answer of the cheap tier, or its beginning. `agreement`: with a second sample, 0 to 1, when there is one."""

    text: str
    certainty: Certainty = Certainty()
    whole: bool = True
    agreement: float = 1.0


def confidence(attempt: Attempt) -> float:
    """0 to 1 without any training: the geometric mean of the tokens' probabilities, 0 for an answer that is none."""
    return 0.0 if failure(attempt) else math.exp(attempt.certainty.mean) * attempt.agreement


def failure(attempt: Attempt) -> str:
    """Why the text is no answer, in a word; empty when it may be one."""
    text = attempt.text.strip()
    if not text:
        return "empty" if attempt.whole else ""
    if refuses(text):
        return "refusal"
    return "loop" if repeats(text) else ""


def refuses(text: str) -> bool:
    """The text begins by saying that it won't or can't."""
    return _REFUSAL.search(text[:200]) is not None


def repeats(text: str, times: int = 4) -> bool:
    """The text ends in the same words again and again."""
    words = text.split()
    for length in range(1, min(24, len(words) // times) + 1):
        tail = words[-length:]
        if all(words[-length * n : len(words) - length * (n - 1)] == tail for n in range(2, times + 1)):
            return True
    return False


def agreement(one: str, other: str) -> float:
    """Share of words that two answers have in common (Jaccard), their numbers counting as much as all else."""
    shares = []
    for pattern in (r"\w+", r"\d+(?:\.\d+)?"):
        left, right = (set(re.findall(pattern, text.lower())) for text in (one, other))
        shares.append(len(left & right) / len(left | right) if left | right else 1.0)
    return sum(shares) / 2


def wrong_sums(text: str) -> tuple[int, int]:
    """Equations of plain numbers in the text: how many are wrong, of how many."""
    found = [_holds(left, right) for left, right in _EQUATION.findall(text)]
    known = [holds for holds in found if holds is not None]
    return known.count(False), len(known)


def _holds(left: str, right: str) -> bool | None:
    """Whether a sum such as `2 * $3 + 1` equals the number; None when it is not plain enough to tell."""
    try:
        value, given = _sum(left), float(right.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
    return abs(value - given) <= 0.011 * max(1.0, abs(value))


def _sum(text: str) -> float:
    """Left to right with the usual precedence."""
    terms: list[float] = [0.0]
    sign, operator = 1.0, "+"
    for symbol, number, percent in _TERM.findall(text):
        if symbol:
            operator = symbol
            continue
        value = float(number.replace(",", "")) / (100 if percent else 1)
        if operator in "+-":
            sign = -1.0 if operator == "-" else 1.0
            terms.append(sign * value)
        else:
            terms[-1] = terms[-1] / value if operator == "/" else terms[-1] * value
    return sum(terms)


_FEATURES: Mapping[str, Callable[[str, Attempt], float]] = {
    "mean log-probability": lambda query, answer: answer.certainty.mean,
    "least log-probability": lambda query, answer: answer.certainty.least,
    "entropy at the start": lambda query, answer: answer.certainty.entropy,
    "disagreement": lambda query, answer: 1 - answer.agreement,
    "failure": lambda query, answer: float(bool(failure(answer))),
    "characters": lambda query, answer: math.log1p(len(answer.text)),
    "longer than the query": lambda query, answer: math.log1p(len(answer.text) / (len(query) + 1)),
    "numbers": lambda query, answer: math.log1p(len(_NUMBER.findall(answer.text))),
    "new numbers": lambda query, answer: math.log1p(len(_numbers(answer.text) - _numbers(query))),
    "numbers not used": lambda query, answer: math.log1p(len(_numbers(query) - _numbers(answer.text))),
    "equations": lambda query, answer: math.log1p(wrong_sums(answer.text)[1]),
    "wrong equations": lambda query, answer: math.log1p(wrong_sums(answer.text)[0]),
    "equals signs": lambda query, answer: math.log1p(answer.text.count("=")),
    "marks": lambda query, answer: math.log1p(len(_MARK.findall(answer.text))),
    "brackets": lambda query, answer: math.log1p(len(_BRACKET.findall(answer.text))),
    "ends in a number": lambda query, answer: float(bool(_END.search(answer.text))),
    "lines": lambda query, answer: math.log1p(answer.text.count("\n")),
    "cut off": lambda query, answer: float(not answer.whole),
}
NAMES = tuple(_FEATURES)


def _numbers(text: str) -> set[str]:
    return set(_NUMBER.findall(text))


def answer_features(query: Query, attempt: Attempt) -> NDArray[np.float64]:
    """[len(NAMES)]"""
    return np.array([feature(query.text, attempt) for feature in _FEATURES.values()])
