"""Whether a release still answers fixed questions as it did: one round beside all before it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from gearshift.eval.graders import GRADERS, Kind

ALPHA = 0.01
"""Chance that a round is called worse when it is none, where the answers to the questions are independent."""


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question; `answers` where it can be checked. A suite's questions will do."""

    id: str
    question: str
    kind: Kind = "text"
    answers: tuple[str, ...] = ()
    split: str = ""


class Watched(msgspec.Struct):
    """One release, as long as its fingerprint stays the same. `well`: rounds in which each question was answered well;
    `first`: digest of its first answer."""

    fingerprint: str = ""
    at: float = 0.0
    rounds: int = 0
    well: dict[str, int] = {}
    first: dict[str, str] = {}
    last: dict[str, bool] = {}
    failed: int = 0
    """Questions of the last round that had no answer."""
    worse: str = ""
    """What the last round was worse in; empty when it was not."""


def is_well(question: Canary, answer: str, first: str | None) -> bool:
    """Right, where that can be checked; else the same as the first time."""
    if question.answers:
        return GRADERS[question.kind](answer, question.answers)
    return first is None or digest(answer) == first


def digest(answer: str) -> str:
    return hashlib.blake2b(answer.encode(), digest_size=8).hexdigest()


def take_round(watched: Watched, well: Mapping[str, bool], failed: int, at: float) -> None:
    """Compares with the rounds before, then adds. A question counts as lost when most rounds answered it well and this one did
    not, as won the other way round; more lost than won is tested by the sign test (one-sided, exact)."""
    from scipy.stats import binomtest  # whoever only checks a file needs none

    known = {name: told for name, told in well.items() if name in watched.well}
    lost = [name for name, told in known.items() if not told and watched.well[name] > watched.rounds / 2]
    won = [name for name, told in known.items() if told and watched.well[name] < watched.rounds / 2]
    watched.worse = ""
    if lost and binomtest(len(lost), len(lost) + len(won), alternative="greater").pvalue <= ALPHA:
        shown = ", ".join(sorted(lost)[:5]) + (", …" if len(lost) > 5 else "")
        watched.worse = f"{len(lost)} of {len(well)} canaries lost and {len(won)} won: {shown}"
    watched.rounds += 1
    for name, told in well.items():
        watched.well[name] = watched.well.get(name, 0) + told
    watched.last, watched.failed, watched.at = dict(well), failed, at
