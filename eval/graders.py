"""Whether an answer is right, for questions whose answer can be checked. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Kind = Literal["text", "number", "choice", "exact"]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_STATED = re.compile(r"(?:answer|choice|option)\s*(?:is|:)?\s*\(?\**\s*([A-D])\b", re.I)
_LETTER = re.compile(r"(?:^|[\s(*\"'])([A-D])(?=[.):,*\"'\s]|$)")


def text(answer: str, accepted: Sequence[str]) -> bool:
    """One of the accepted words is in the answer, as a word or the beginning of one; short ones and symbols as they are."""
    for each in accepted:
        short = len(each) <= 2
        pattern = rf"(?<!\w){re.escape(each)}" + (r"(?!\w)" if short else "")
        if re.search(pattern, answer, 0 if short else re.I):
            return True
    return False


def number(answer: str, accepted: Sequence[str]) -> bool:
    """The last number in the answer equals an accepted one."""
    found = _NUMBER.findall(answer)
    if not found:
        return False
    last = float(found[-1].replace(",", ""))
    return any(abs(last - float(each)) < 1e-6 for each in accepted)


def choice(answer: str, accepted: Sequence[str]) -> bool:
    """The letter that the answer states, or else the first that stands alone."""
    stated = _STATED.search(answer) or _LETTER.search(answer)
    return stated is not None and stated.group(1).upper() in accepted


def exact(answer: str, accepted: Sequence[str]) -> bool:
    """The answer is an accepted one, but for case and space at its ends."""
    return answer.strip().casefold() in {each.strip().casefold() for each in accepted}


GRADERS: Mapping[Kind, Callable[[str, Sequence[str]], bool]] = {
    "text": text,
    "number": number,
    "choice": choice,
    "exact": exact,
}
