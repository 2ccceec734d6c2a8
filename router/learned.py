"""Scorers that are trained: what each tier's answer to a query is worth, from labelled queries.

One logistic model a tier over the words of the query and its features. On public data the difference of two such models
ranks better than one model of the difference, and words better than embeddings at a twentieth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gearshift.router import answers as answers_module
from gearshift.router import features as features_module
from gearshift.router.answers import Attempt, answer_features
from gearshift.router.features import Query, features
from gearshift.router.trees import NO_AXES, Trees, inputs
from gearshift.router.words import Words

Numbers = NDArray[np.float64]
Kind = Literal["features", "tfidf", "embedding", "blend", "semantic", "answer"]
STRENGTH = {"tfidf": 0.3, "embedding": 1.0, "answer": 0.5}
"""Inverse of the L2 penalty, chosen on folds of MMLU's training rows."""
BESIDE_WORDS = {"tfidf": 0.1, "answer": 0.5}
"""Features are shrunk beside words, whose vectors have length one."""
PARTS: dict[str, tuple[str, ...]] = {
    "features": ("trees",),
    "blend": ("tfidf", "trees"),
    "semantic": ("trees", "embedded trees"),
}
EMBEDDED: tuple[Kind, ...] = ("embedding", "semantic")
"""Kinds that look at the vectors of queries."""
TREES = 150
AXES = 24
"""Of queries' vectors that trees look at. Subjects they have never seen are ranked best with these few; all of a vector's numbers
tell subjects apart instead."""
LEAF_SHARE = 0.007
"""Of the rows, at least so many in a leaf."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Labelled queries. qualities: [n, tiers] in 0 to 1, what each tier's answer was worth, from cheap to expensive."""

    queries: Sequence[Query]
    qualities: Numbers


@dataclass(frozen=True, slots=True)
class Linear:
    """One logistic model a tier. weights: [tiers, words + features + embedding]; `words` may be None.

    One of kind `answer` reads the cheap tier's answer: its words instead of the query's, and what it tells about itself.
    """

    kind: str
    words: Words | None
    center: Numbers
    scale: Numbers
    embedded: int
    weights: Numbers
    bias: Numbers

    def qualities(self, queries: Sequence[Query]) -> Numbers:
        """[n, tiers], each in 0 to 1."""
        wanted: Numbers = np.zeros((len(queries), len(self.bias))) + self.bias
        at = 0
        if self.words is not None:
            at = self.words.idf.size
            for row, text in zip(wanted, texts(self.kind, queries), strict=True):
                places, values = self.words.row(text)
                row += self.weights[:, places] @ values
        if self.center.size:
            dense = (numbers(self.kind, queries) - self.center) * self.scale
            wanted += dense @ self.weights[:, at : at + dense.shape[1]].T
            at += dense.shape[1]
        if self.embedded:
            wanted += np.array([query.embedding for query in queries]) @ self.weights[:, at:].T
        return 1 / (1 + np.exp(-wanted))

    def why(self, query: Query) -> list[tuple[str, float]]:
        """Each input with what it adds to the log-odds of the most expensive tier less those of the cheapest."""
        weights = self.weights[-1] - self.weights[0]
        found: list[tuple[str, float]] = []
        at = 0
        if self.words is not None:
            places, values = self.words.row(texts(self.kind, [query])[0])
            names, at = self.words.terms(), self.words.idf.size
            found += [(f"“{names[i]}”", float(x * weights[i])) for i, x in zip(places, values, strict=True)]
        if self.center.size:
            dense = (numbers(self.kind, [query])[0] - self.center) * self.scale
            found += zip(feature_names(self.kind), (dense * weights[at : at + dense.size]).tolist(), strict=True)
        return found


@dataclass(frozen=True, slots=True)
class Learned:
    """The mean of its parts, without those that need vectors of queries where there are none. Gains of a tier are over the
    cheapest one."""

    parts: tuple[Linear | Trees, ...]

    @property
    def needs_embedding(self) -> bool:
        return any(part.embedded for part in self.parts)

    def qualities(self, queries: Sequence[Query]) -> Numbers:
        """[n, tiers]. Raises `ValueError` when no part can do without vectors."""
        has_vectors = all(query.embedding for query in queries)
        parts = [part for part in self.parts if has_vectors or not part.embedded]
        if not parts:
            raise ValueError("this scorer needs the vectors of queries")
        total: Numbers = np.mean([part.qualities(queries) for part in parts], axis=0)
        return total

    def gains(self, query: Query) -> tuple[float, ...]:
        row = self.qualities([query])[0]
        return tuple(float(each) for each in row - row[0])

    def score(self, query: Query) -> float:
        return self.gains(query)[-1]

    def why(self, query: Query, most: int = 12) -> list[tuple[str, float]]:
        """Words and features of the query that say most for the most expensive tier (above 0) or for the cheapest, in
        log-odds or, from trees, in quality; strongest first."""
        found = [item for part in self.parts for item in part.why(query)]
        return sorted((item for item in found if abs(item[1]) > 1e-6), key=lambda item: -abs(item[1]))[:most]


def train(kind: Kind, examples: Examples) -> Learned:
    """Raises `ValueError` when there is nothing to learn from."""
    if len(examples.queries) < 20:
        raise ValueError(f"{len(examples.queries)} labelled queries are too few to train on: at least 20")
    fits = [GROWN[part](examples) if part in GROWN else _fit(part, examples) for part in PARTS.get(kind, (kind,))]
    return Learned(tuple(fits))


def texts(kind: str, queries: Sequence[Query]) -> list[str]:
    """What the words are taken from."""
    return [_attempt(query).text if kind == "answer" else query.text for query in queries]


def feature_names(kind: str) -> list[str]:
    """Of the columns of `numbers`."""
    own = list(features_module.NAMES)
    return own if kind != "answer" else [*own, *(f"answer: {name}" for name in [*own, *answers_module.NAMES])]


def numbers(kind: str, queries: Sequence[Query]) -> Numbers:
    """[n, features]"""
    rows = [features(query) for query in queries]
    if kind == "answer":
        told = [(features(Query(_attempt(q).text)), answer_features(q, _attempt(q))) for q in queries]
        rows = [np.concatenate([row, *more]) for row, more in zip(rows, told, strict=True)]
    return np.array(rows)


def _attempt(query: Query) -> Attempt:
    if query.attempt is None:
        raise ValueError("a judge of answers needs an answer")
    return query.attempt


def _grow(examples: Examples, axes: Numbers = NO_AXES, share: float = 1.0) -> Trees:
    """share: of the inputs that each split chooses from."""
    from sklearn.ensemble import ExtraTreesRegressor

    leaf = max(5, round(LEAF_SHARE * len(examples.queries)))
    forest = ExtraTreesRegressor(TREES, min_samples_leaf=leaf, max_features=share, random_state=0)
    return Trees.of(forest.fit(inputs(examples.queries, axes), examples.qualities), axes)


def _grow_embedded(examples: Examples) -> Trees:
    from sklearn.decomposition import PCA

    vectors = _vectors(examples)
    axes = PCA(min(AXES, *vectors.shape), random_state=0).fit(vectors).components_
    return _grow(examples, np.asarray(axes, dtype=np.float64), 0.5)


def _vectors(examples: Examples) -> Numbers:
    """[n, width]. Raises `ValueError` where there are none."""
    vectors = np.array([query.embedding for query in examples.queries])
    if vectors.ndim != 2 or not vectors.shape[1]:
        raise ValueError("the embedding scorer needs queries with vectors")
    return vectors


GROWN: dict[str, Callable[[Examples], Trees]] = {"trees": _grow, "embedded trees": _grow_embedded}


def _fit(kind: str, examples: Examples) -> Linear:
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer

    blocks: list[Any] = []
    words, center, scale, embedded = None, np.empty(0), np.empty(0), 0
    if kind in ("tfidf", "answer"):
        words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2, dtype=np.float64)
        try:
            blocks.append(words.fit_transform(texts(kind, examples.queries)))
        except ValueError:  # no word comes twice: there are only the features
            words = None
    if kind != "embedding":
        dense = numbers(kind, examples.queries)
        center, spread = dense.mean(axis=0), dense.std(axis=0)
        scale = np.where(spread > 1e-9, 1 / np.maximum(spread, 1e-9), 0.0) * BESIDE_WORDS.get(kind, 1.0)
        blocks.append(sparse.csr_matrix((dense - center) * scale))
    if kind == "embedding":
        vectors = _vectors(examples)
        embedded = vectors.shape[1]
        blocks.append(sparse.csr_matrix(vectors))
    inputs = sparse.hstack(blocks).tocsr()
    fitted = [_logistic(inputs, quality, STRENGTH[kind]) for quality in examples.qualities.T]
    weights, bias = np.array([weights for weights, _ in fitted]), np.array([bias for _, bias in fitted])
    return Linear(kind, None if words is None else Words.of(words), center, scale, embedded, weights, bias)


def _logistic(inputs: Any, quality: Numbers, strength: float) -> tuple[Numbers, float]:
    """Weights and bias. A quality between 0 and 1 counts as both labels, each with its share."""
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression

    if np.ptp(quality) < 1e-9:  # nothing to learn: the same for every query
        share = float(np.clip(quality[0], 1e-3, 1 - 1e-3))
        return np.zeros(inputs.shape[1]), float(np.log(share / (1 - share)))
    labels = np.concatenate([np.ones(len(quality)), np.zeros(len(quality))])
    shares = np.concatenate([quality, 1 - quality])
    kept = shares > 0
    model = LogisticRegression(C=strength, max_iter=1000)
    model.fit(sparse.vstack([inputs, inputs])[kept], labels[kept], sample_weight=shares[kept])
    return model.coef_[0], float(model.intercept_[0])
