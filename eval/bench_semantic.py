"""The semantic half of `gearshift bench cache`: does the verifier tell paraphrases from what only looks alike?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gearshift.eval.bench import Bar, Report, Result
from gearshift.eval.paraphrases import Labelled, read_pairs
from gearshift.eval.verifier_training import Embed, Judged, judge, judge_adversarial
from gearshift.platform.cache.verifier import Verifier, data_hash

MOST_FALSE, LEAST_RECALL = 0.01, 0.22


def bench_semantic(verifier: Verifier, embed: Embed, files: Sequence[Path], report: Report) -> None:
    """On made-up pairs, and on those of files. Of pairs that the verifier was trained on, what it did on the folds that were
    left out is told, and not what it does on them now."""
    _tell_kinds(report, "made up", judge_adversarial(verifier, embed))
    for file in files:
        pairs = read_pairs(file)
        if _trained_on(verifier, pairs):
            card = verifier.card
            _tell_shares(report, f"{file.name}, held-out folds", card.false_hits, card.recall)
            continue
        found = judge(verifier, pairs, embed)
        if any(pair.same for pair in pairs):
            _tell_shares(report, file.name, found.false_hits, found.recall)
        else:
            _tell_kinds(report, file.name, found)


def _trained_on(verifier: Verifier, pairs: Sequence[Labelled]) -> bool:
    return data_hash([(pair.one, pair.other, pair.same) for pair in pairs]) == verifier.card.data


def _tell_shares(
    report: Report, name: str, false: tuple[float, float, float], recall: tuple[float, float, float]
) -> None:
    for what, share in (("false hits", false), ("recall", recall)):
        values = tuple(100 * value for value in share)
        report.results.append(Result(f"{name}: {what} (95 % interval)", "%", values))
    report.bars.append(Bar(f"{name}: false hits, %", 100 * false[1], 100 * MOST_FALSE, "max"))
    report.bars.append(Bar(f"{name}: recall, %", 100 * recall[1], 100 * LEAST_RECALL, "min"))


def _tell_kinds(report: Report, name: str, found: Judged) -> None:
    for kind, (hits, count) in found.by_kind.items():
        report.results.append(Result(f"{name}: hits on {count} pairs, {kind}", "", (float(hits),)))
    report.bars.append(Bar(f"{name}: hits", sum(hits for hits, _ in found.by_kind.values()), 0, "max"))
