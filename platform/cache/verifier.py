"""The trained half of the comparison: how surely two questions ask the same, by boosted trees over what can be counted in them.

Gradient boosting (Friedman 2001, Annals of Statistics 29, section 4.5), grown by scikit-learn and walked by `Forest`. The file is
safetensors: loading it executes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from gearshift import __version__
from gearshift.platform.cache.paraphrase import NAMES, Pair, equal, features, vetoes
from gearshift.platform.errors import ConfigError
from gearshift.platform.trees import Forest

FORMAT = 1
SHIPPED = Path(__file__).parent / "verifier.safetensors"
Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Card:
    """What a reader needs to know before trusting a verifier."""

    encoder: str
    """Source of the vectors that it knows; those of another one mean nothing to it."""
    threshold: float
    """A pair of a score above it asks the same."""
    wanted: float
    """Share of different pairs that may be taken for the same, which the threshold was chosen for."""
    false_hits: tuple[float, float, float]
    """That share on pairs that were left out of the training, between the ends of its 95 % interval."""
    recall: tuple[float, float, float]
    """Of pairs that ask the same, likewise: the share that is found."""
    rows: int
    data: str
    """SHA-256 of the labelled pairs."""
    source: str = ""
    """Where they come from, and under which terms."""
    format: int = FORMAT
    version: str = __version__
    """Of the program that trained it."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """center: [width], topics: [topics, width], which project the mean of two vectors onto what they are about. trees: over
    `rows`, one output, whose sum and `start` are log-odds."""

    card: Card
    center: Vectors
    topics: Vectors
    start: float
    trees: Forest

    def scores(self, pairs: Sequence[Pair], one: Vectors, others: Vectors) -> NDArray[np.float64]:
        """Log-odds that each pair asks the same, [n]; -inf where something forbids it, and inf where the words are equal.
        one: [width] or [n, width], others: [n, width]; vectors of length one."""
        found = self.start + self.trees.leaves(rows(pairs, one, others, self.center, self.topics)).sum(axis=1)[:, 0]
        return decided(pairs, found)

    def save(self, path: Path) -> None:
        arrays = {name: getattr(self.trees, name) for name in Forest.__dataclass_fields__}
        tensors = {**arrays, "center": self.center, "topics": self.topics, "start": np.array([self.start])}
        # the format keeps the bytes as they lie in memory, and knows of no other order than C's
        content = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(safetensors.numpy.save(content, {"card": json.dumps(asdict(self.card))}))


def decided(pairs: Sequence[Pair], scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The trees' scores, where words alone do not decide."""
    sure = np.array([equal(pair) for pair in pairs])
    forbidden = np.array([bool(vetoes(pair)) for pair in pairs])
    result: NDArray[np.float64] = np.where(forbidden, -np.inf, np.where(sure, np.inf, scores))
    return result


def rows(pairs: Sequence[Pair], one: Vectors, others: Vectors, center: Vectors, topics: Vectors) -> NDArray[np.float64]:
    """What the trees look at, [n, len(NAMES) + 2 * topics]: what is counted, what both are about, and how far apart they are in
    that. one: [width] or [n, width]."""
    cosines = (np.broadcast_to(one, others.shape) * others).sum(axis=1)
    counted = np.array([features(pair, cosine) for pair, cosine in zip(pairs, cosines.tolist(), strict=True)])
    mine, theirs = ((np.broadcast_to(each, others.shape) - center) @ topics.T for each in (one, others))
    about = np.hstack([(mine + theirs) / 2, np.abs(mine - theirs)]).astype(np.float64)
    return np.hstack([counted.reshape(len(pairs), len(NAMES)), about])


def load(path: Path, encoder: str) -> Verifier:
    """encoder: whose vectors it will get. Raises `ConfigError` for a file that is missing, damaged, foreign, or made for another
    encoder or another version of the format."""
    where = "cache.semantic.verifier"
    try:
        content = path.read_bytes()
        tensors = safetensors.numpy.load(content)
        card = json.loads(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]["card"])
    except OSError as error:
        raise ConfigError(f"{where}: {path}: {error.strerror}") from error
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"{where}: {path} is damaged or is no verifier: {error}") from error
    if card.get("format") != FORMAT:
        raise ConfigError(
            f"{where}: {path} has format {card.get('format')}, this program reads {FORMAT}; train it anew"
        )
    if card.get("encoder") != encoder:
        raise ConfigError(
            f"{where}: {path} was trained for vectors of {card.get('encoder')}, and embedding.source is {encoder}; train one "
            "for it with `gearshift cache train`"
        )
    try:
        intervals = {name: tuple(card[name]) for name in ("false_hits", "recall")}
        trees = Forest(**{name: tensors[name] for name in Forest.__dataclass_fields__})
        center, topics, start = (tensors[name] for name in ("center", "topics", "start"))
        trees.check(len(NAMES) + 2 * len(topics), 1)
        if topics.shape[1:] != center.shape or not np.isfinite(topics).all() or not np.isfinite(center).all():
            raise ValueError(f"topics of {topics.shape} do not fit vectors of {center.shape}")
        return Verifier(Card(**card | intervals), center, topics, float(start[0]), trees)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{where}: {path} is no verifier made by `gearshift cache train`: {error}") from error


def data_hash(pairs: Sequence[tuple[str, str, bool]]) -> str:
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(json.dumps(pair).encode())
    return "sha256:" + digest.hexdigest()
