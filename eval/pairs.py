"""Pairs of answers given to a judge over the API: does it agree with people, and which of two releases does it prefer?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gearshift.eval import judge, suite
from gearshift.eval.answered import Question
from gearshift.eval.judge import SAME, Agreement, Preference
from gearshift.eval.suite import Asker, Graded
from gearshift.platform.request import JsonObject
from gearshift.platform.weights.source import Progress

VALUES = {"a": 1.0, "b": 0.0, "tie": 0.5}
WORDS = ("won", "lost", "tie", "same", "order", "unclear", "failed")


class LabelledPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two answers, and which of them people prefer."""

    id: str
    question: str
    a: str
    b: str
    preferred: Literal["a", "b", "tie"]


def judged(asker: Asker, release: str, pairs: Sequence[tuple[str, str, str]], progress: Progress) -> list[Preference]:
    """Of each question, answer and rival: both orders are asked, but for answers that are the same."""
    asked = [place for place, (_, answer, rival) in enumerate(pairs) if answer.strip() != rival.strip()]
    questions = []
    for place in asked:
        text, answer, rival = pairs[place]
        for order, both in (("forth", (answer, rival)), ("back", (rival, answer))):
            questions.append(Question(f"{place} {order}", "", "text", judge.question(text, *both), ()))
    found = [SAME] * len(pairs)
    if questions:
        said = suite.run(asker, release, questions, progress).generations
        for place, forth, back in zip(asked, said[::2], said[1::2], strict=True):
            failed = forth.error or back.error
            found[place] = Preference(None, "failed") if failed else judge.preference(forth.answer, back.answer)
    return found


def agreement_with(labels: Sequence[LabelledPair], told: Sequence[Preference]) -> Agreement:
    """Raises `ValueError` when the judge had no verdict at all."""
    return judge.agreement(told, [VALUES[label.preferred] for label in labels])


def preferred(told: Sequence[Preference], runs: Sequence[Graded]) -> JsonObject:
    """How often the judge prefers the release's answer to the baseline's, and, where only one of them is right, how often it
    prefers that one: the labels that the suite itself has."""
    values = [each.value for each in told if each.value is not None]
    labelled = [
        (preference, float(mine)) for preference, mine, other in zip(told, runs[0].right, runs[1].right, strict=True)
        if mine != other and preference.value is not None
    ]  # fmt: skip
    found: JsonObject = {
        "pairs": len(told),
        "labels": {word: sum(each.label == word for each in told) for word in WORDS},
        "preferred": suite.mean_with_interval(values) if values else None,
        "agreement": None,
    }
    if labelled:
        each, right = [preference for preference, _ in labelled], [label for _, label in labelled]
        found["agreement"] = msgspec.to_builtins(judge.agreement(each, right))
    return found


def markdown(release: str, found: JsonObject) -> str:
    """A section of the suite's report."""
    labels = ", ".join(f"{count} {word}" for word, count in found["labels"].items() if count)
    lines = ["", f"## What `{release}` says as judge", "", f"{found['pairs']} pairs, each in both orders: {labels}."]
    if found["preferred"]:
        low, mean, high = found["preferred"]
        lines.append(f"Preference for the release: {mean:.1%} ({low:.1%}–{high:.1%}); 50 % is none.")
    told = found["agreement"]
    if told is None:
        lines.append("No question on which exactly one is right: nothing to check the judge against.")
    else:
        low, share, high = told["agreed"]
        kappa = "—" if told["kappa"] is None else f"{told['kappa']:.2f}"
        lines.append(
            f"Where exactly one of the two is right ({told['pairs']} questions) it took a side on {told['decided']}"
            + (f", and the right one on {share:.1%} ({low:.1%}–{high:.1%}) of those" if told["decided"] else "")
            + f"; kappa {kappa}."
        )
    return "\n".join(lines) + "\n"
