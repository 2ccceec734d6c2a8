"""A trained rule as numbers: is this text what the rule is about?

Two linear models over the same n-grams. The plain one costs a fraction of a millisecond and decides most texts; where it is in
doubt, the other one also looks at the text's sentence vector, which the encoder makes once for everybody who asks. A file of
numbers (safetensors) with a card in its metadata; loading it executes nothing.

A score is 0.5 at the operating point that the card tells of: where `false_positives` of the harmless texts it was tested on,
none of which it had seen, were flagged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gearshift.guardrails import artefact
from gearshift.guardrails.artefact import Card
from gearshift.guardrails.ngrams import MAX_CHARS, PLACES, counted, weighted
from gearshift.platform.errors import ConfigError

MAX_ASKED_CHARS = 300
"""Longer texts have words enough: the plain model decides, which costs a hundredth of a vector. Unless it never does."""
OVERLAP = 500
"""Characters that two windows of a long text share."""
Floats = NDArray[np.floating[Any]]
NOTHING: Floats = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Model:
    """Its score is 0 at the operating point.

    weights: [PLACES], of n-grams. vector: [width] or [0], of the sentence vector. near: [n, width] or none, examples whose
    likeness to the sentence vector counts `pulls` [n] times exp(-gamma * squared distance): a support vector machine (Cortes &
    Vapnik 1995, Machine Learning 20)."""

    weights: Floats
    bias: float
    vector: Floats = field(default_factory=lambda: NOTHING)
    near: Floats = field(default_factory=lambda: NOTHING)
    pulls: Floats = field(default_factory=lambda: NOTHING)
    gamma: float = 0.0

    def of_grams(self, places: NDArray[np.int64], values: NDArray[np.float32]) -> float:
        return float(self.weights[places].astype(np.float32) @ values) + self.bias

    def of_vector(self, vector: Sequence[float]) -> float:
        """Of a vector of length one."""
        at = np.asarray(vector, dtype=np.float32)
        value = float(at @ self.vector) if self.vector.size else 0.0
        if self.pulls.size:
            value += float(self.pulls @ np.exp(-self.gamma * (2 - 2 * (self.near.astype(np.float32) @ at))))
        return value


@dataclass(frozen=True, slots=True)
class Classifier:
    card: Card
    idf: Floats
    plain: Model
    joint: Model
    doubt: tuple[float, float]
    """Plain scores between which the vector is worth its cost."""

    def score(self, text: str, vectors: Callable[[str], Sequence[float] | None] | None = None) -> float | None:
        """0 to 1, of a normalised text: the greatest of its windows. None where a window is in doubt and its vector missing.

        vectors: those of the texts in `doubtful`; None where no encoder runs, then the plain model decides alone.
        """
        found: list[float] = []
        for window in windows(text):
            grams = weighted(counted(window), self.idf)
            value = self.plain.of_grams(*grams)
            if vectors is not None and self._doubts(window, value):
                vector = vectors(window)
                if vector is None:
                    return None
                value = self.joint.of_grams(*grams) + self.joint.of_vector(vector)
            found.append(value)
        return float(1 / (1 + np.exp(-max(found, default=-np.inf))))

    def doubtful(self, text: str) -> list[str]:
        """Windows whose vectors `score` will ask for."""
        values = ((window, self.plain.of_grams(*weighted(counted(window), self.idf))) for window in windows(text))
        return [window for window, value in values if self._doubts(window, value)]

    def _doubts(self, window: str, value: float) -> bool:
        asks = len(window) <= MAX_ASKED_CHARS or np.isinf(self.doubt[1])
        return bool(asks and self.doubt[0] < value < self.doubt[1])


def windows(text: str) -> list[str]:
    """The parts of a text that are looked at one by one."""
    step = MAX_CHARS - OVERLAP
    return [text[start : start + MAX_CHARS] for start in range(0, max(1, len(text) - OVERLAP), step)]


def save(path: Path, classifier: Classifier) -> None:
    tensors: dict[str, Floats] = {
        "idf": classifier.idf.astype(np.float16),
        "plain.weights": classifier.plain.weights.astype(np.float16),
        "joint.weights": classifier.joint.weights.astype(np.float16),
        "joint.vector": classifier.joint.vector.astype(np.float32),
        "joint.near": classifier.joint.near.astype(np.float16),
        "joint.pulls": classifier.joint.pulls.astype(np.float32),
        "numbers": np.array([classifier.plain.bias, classifier.joint.bias, classifier.joint.gamma, *classifier.doubt]),
    }
    artefact.save(path, classifier.card, tensors)


def load(path: Path) -> Classifier:
    """Raises `ConfigError` for a file that is missing, damaged, foreign, or of another format."""
    card, tensors = artefact.load(path)
    try:
        numbers = tensors["numbers"]
        weights = [tensors[name] for name in ("idf", "plain.weights", "joint.weights")]
        vector, near, pulls = (tensors[f"joint.{name}"] for name in ("vector", "near", "pulls"))
    except KeyError as error:
        raise ConfigError(f"{path} is not a classifier: {error} is missing") from error
    if any(each.shape != (PLACES,) or not np.isfinite(each).all() for each in weights) or numbers.shape != (5,):
        raise ConfigError(f"{path}: its weights are not {PLACES} finite numbers; train it anew")
    fits = near.shape[0] == pulls.size and (pulls.size == 0 or near.ndim == 2) and vector.ndim == 1
    if not fits or not all(np.isfinite(each).all() for each in (vector, near, pulls)):
        raise ConfigError(f"{path}: its examples and their weights do not fit together; train it anew")
    joint = Model(weights[2], float(numbers[1]), vector, near, pulls, float(numbers[2]))
    return Classifier(
        card, weights[0], Model(weights[1], float(numbers[0])), joint, (float(numbers[3]), float(numbers[4]))
    )
