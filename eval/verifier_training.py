"""Trains the verifier of the semantic cache on labelled pairs, and says how it does on pairs that it has not seen.

Pairs that share a question, also by way of others, stay together: folds are made of such groups. The threshold is the lowest one
that keeps the wanted share of false hits on all folds, each scored by trees that were grown on the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from gearshift.eval.paraphrases import Labelled, adversarial, groups
from gearshift.platform.cache.paraphrase import NAMES, Pair, read
from gearshift.platform.cache.verifier import Card, Verifier, data_hash, decided, rows
from gearshift.platform.errors import InvalidRequest
from gearshift.platform.trees import LEAF, Forest

FOLDS, TOPICS = 5, 64
LEAST = 1000
"""Pairs of either kind."""
SEED = 0
ADVERSARIAL = 100
"""Of each kind."""
GROWN: dict[str, Any] = {
    "max_iter": 600,
    "learning_rate": 0.03,
    "max_leaf_nodes": 31,
    "min_samples_leaf": 40,
    "l2_regularization": 5,
    "max_features": 0.3,
    "early_stopping": False,
}
VIEWS = (len(NAMES) + TOPICS, len(NAMES) + 2 * TOPICS)
"""Columns that each of the forests sees, from the first one: without and with how the two differ."""

Numbers = NDArray[np.float64]
Vectors = NDArray[np.float32]
Embed = Callable[[Sequence[str]], Vectors]


@dataclass(frozen=True, slots=True)
class Read:
    """Labelled pairs as the trees see them. one, other: [n, width], vectors of length one."""

    pairs: list[Pair]
    one: Vectors
    other: Vectors
    same: NDArray[np.bool_]


def read_all(labelled: Sequence[Labelled], embed: Embed) -> Read:
    texts = list(dict.fromkeys(text for pair in labelled for text in (pair.one, pair.other)))
    place, vectors = {text: number for number, text in enumerate(texts)}, embed(texts)
    readings = {text: read(text) for text in texts}
    return Read(
        [Pair.of(readings[pair.one], readings[pair.other]) for pair in labelled],
        vectors[[place[pair.one] for pair in labelled]],
        vectors[[place[pair.other] for pair in labelled]],
        np.array([pair.same for pair in labelled]),
    )


def train(labelled: Sequence[Labelled], embed: Embed, encoder: str, wanted: float, source: str) -> Verifier:
    """encoder: source of the vectors. wanted: share of different pairs that may be taken for the same. Raises `InvalidRequest`
    for too few pairs."""
    same = sum(pair.same for pair in labelled)
    if min(same, len(labelled) - same) < LEAST:
        raise InvalidRequest(f"{same} pairs ask the same and {len(labelled) - same} do not; needs {LEAST} of either.")
    data = read_all(labelled, embed)
    center, topics = _topics(np.concatenate([data.one, data.other]))
    table = rows(data.pairs, data.one, data.other, center, topics)
    scores = decided(data.pairs, _held_out(table, data.same, _folds(labelled)))
    threshold = lowest(scores[~data.same], wanted)
    false, true = (int((scores[data.same == kind] > threshold).sum()) for kind in (False, True))
    start, forest = _grow(table, data.same)
    card = Card(
        encoder=encoder,
        threshold=threshold,
        wanted=wanted,
        false_hits=share(false, int((~data.same).sum())),
        recall=share(true, int(data.same.sum())),
        rows=len(labelled),
        data=data_hash([(pair.one, pair.other, pair.same) for pair in labelled]),
        source=source,
    )
    return Verifier(card, center, topics, start, forest)


def lowest(scores: Numbers, wanted: float) -> float:
    """The threshold above which at most the wanted share of different pairs is. Conformal risk control (Angelopoulos et al. 2022,
    arXiv 2208.02814, section 2): one more pair, the worst possible, is counted in."""
    allowed = int(wanted * (len(scores) + 1)) - 1
    if allowed < 0:
        raise InvalidRequest(f"{len(scores)} different pairs can't tell a share of {wanted}; bring more.")
    return float(np.sort(scores)[::-1][allowed])


def share(count: int, of: int) -> tuple[float, float, float]:
    """Between the ends of its 95 % interval (Wilson)."""
    if not of:
        return 0.0, 0.0, 1.0
    found = binomtest(count, of).proportion_ci(method="wilson")
    return float(found.low), count / of, float(found.high)


@dataclass(frozen=True, slots=True)
class Judged:
    """How a verifier does on labelled pairs. Shares between the ends of their 95 % intervals."""

    false_hits: tuple[float, float, float]
    recall: tuple[float, float, float]
    by_kind: dict[str, tuple[int, int]]
    """Of pairs that look alike and ask something else: hits, of how many."""


def judge(verifier: Verifier, labelled: Sequence[Labelled], embed: Embed) -> Judged:
    data = read_all(labelled, embed)
    scores = verifier.scores(data.pairs, data.one, data.other)
    hits = scores > verifier.card.threshold
    false, true = hits[~data.same], hits[data.same]
    kinds = sorted({pair.kind for pair in labelled if not pair.same})
    return Judged(
        share(int(false.sum()), len(false)),
        share(int(true.sum()), len(true)),
        {
            kind: (sum(bool(hits[n]) for n in listed), len(listed))
            for kind in kinds
            for listed in [[n for n, pair in enumerate(labelled) if pair.kind == kind and not pair.same]]
        },
    )


def judge_adversarial(verifier: Verifier, embed: Embed) -> Judged:
    """On pairs that are made up here."""
    return judge(verifier, adversarial(ADVERSARIAL, SEED), embed)


def _folds(labelled: Sequence[Labelled]) -> NDArray[np.int64]:
    numbers = groups(labelled)
    rng = random.Random(SEED)
    fold_of = [rng.randrange(FOLDS) for _ in range(max(numbers) + 1)]
    return np.array([fold_of[number] for number in numbers])


def _topics(vectors: Vectors) -> tuple[Vectors, Vectors]:
    """Center and first principal components, [width] and [TOPICS, width]."""
    from sklearn.decomposition import PCA

    few = np.random.default_rng(SEED).choice(len(vectors), min(len(vectors), 20_000), replace=False)
    fitted = PCA(TOPICS, random_state=SEED).fit(vectors[few])
    return fitted.mean_.astype(np.float32), fitted.components_.astype(np.float32)


def _held_out(table: Numbers, same: NDArray[np.bool_], folds: NDArray[np.int64]) -> Numbers:
    scores = np.zeros(len(table))
    for fold in range(FOLDS):
        left = folds == fold
        start, forest = _grow(table[~left], same[~left])
        scores[left] = start + forest.leaves(table[left]).sum(axis=1)[:, 0]
    return scores


def _grow(table: Numbers, same: NDArray[np.bool_]) -> tuple[float, Forest]:
    """Log-odds before any tree, and the trees: the mean of a forest for each of the views."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    start, forests = 0.0, []
    for seed, columns in enumerate(VIEWS):
        grown = HistGradientBoostingClassifier(random_state=seed, **GROWN).fit(table[:, :columns], same)
        start += float(grown._baseline_prediction[0, 0]) / len(VIEWS)
        forests += [trees[0].nodes for trees in grown._predictors]
    return start, _forest(forests, 1 / len(VIEWS))


def _forest(trees: Sequence[Any], weight: float) -> Forest:
    """From the library's own arrays of nodes, of which each tree's are numbered from 0."""
    starts = np.cumsum([0, *(len(nodes) for nodes in trees)])[:-1]
    leaf = np.concatenate([nodes["is_leaf"].astype(bool) for nodes in trees])
    left, right = (
        np.concatenate([nodes[side].astype(np.int64) + start for nodes, start in zip(trees, starts, strict=True)])
        for side in ("left", "right")
    )
    values = np.concatenate([nodes["value"] for nodes in trees]) * weight
    return Forest(
        np.where(leaf, LEAF, np.concatenate([nodes["feature_idx"] for nodes in trees])).astype(np.int32),
        np.concatenate([nodes["num_threshold"] for nodes in trees]).astype(np.float64),
        np.where(leaf, 0, left).astype(np.int32),
        np.where(leaf, 0, right).astype(np.int32),
        np.where(leaf, values, 0.0)[:, np.newaxis],
        starts.astype(np.int32),
    )
