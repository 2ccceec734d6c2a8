"""A trained scorer as a file: what it computes with, and a card that says what it is. Loading it executes nothing.

A safetensors file: arrays of numbers, and JSON in its metadata. (skops would keep the library's objects, but loading it takes
torch and 250 MiB into every gateway.)
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from gearshift import __version__
from gearshift.platform.errors import ConfigError
from gearshift.router.features import NAMES
from gearshift.router.learned import Examples, Learned, Linear, feature_names
from gearshift.router.trees import Trees
from gearshift.router.words import Words

FORMAT = 1
ARRAYS = ("center", "scale", "weights", "bias")


@dataclass(frozen=True, slots=True)
class Card:
    """What a reader needs to know before trusting a scorer."""

    kind: str
    tiers: tuple[str, ...]
    """From cheap to expensive, the order of its qualities."""
    rows: int
    data: str
    """SHA-256 of the labelled queries it was trained on."""
    source: str = ""
    """Where they come from, and under which licence."""
    encoder: str = ""
    """Source of the vectors that it knows; empty for one that looks at none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """On rows that were left out of the training."""
    format: int = FORMAT
    version: str = __version__
    """Of the program that trained it."""


@dataclass(frozen=True, slots=True)
class Artefact:
    card: Card
    scorer: Learned
    digest: str
    """SHA-256 of the file: a calibration names it, since thresholds of one scorer mean nothing for another."""


def data_hash(examples: Examples) -> str:
    digest = hashlib.sha256()
    for query, qualities in zip(examples.queries, examples.qualities, strict=True):
        answer = query.attempt.text if query.attempt else ""
        digest.update(json.dumps([query.text, query.turns, answer, *map(float, qualities)]).encode())
    return "sha256:" + digest.hexdigest()


def save(path: Path, scorer: Learned, card: Card) -> Artefact:
    tensors: dict[str, NDArray[Any]] = {}
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(scorer.parts):
        arrays, described = _taken_apart(part)
        tensors |= {f"{number}.{name}": np.ascontiguousarray(array) for name, array in arrays.items()}
        parts.append(described)
    metadata = {"card": json.dumps(asdict(card)), "parts": json.dumps(parts)}
    content = safetensors.numpy.save(tensors, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return Artefact(card, scorer, _digest(content))


def load(path: Path) -> Artefact:
    """Raises `ConfigError` for a file that is missing, damaged, foreign, or made for another version of the format."""
    try:
        content = path.read_bytes()
        tensors = safetensors.numpy.load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    except OSError as error:
        raise ConfigError(f"router.artefact: {path}: {error.strerror}") from error
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"router.artefact: {path} is damaged or is not a scorer: {error}") from error
    try:
        card = Card(**json.loads(metadata["card"]))
        if card.format != FORMAT:
            raise ConfigError(
                f"router.artefact: {path} has format {card.format}, this program reads {FORMAT}; train it anew"
            )
        described = json.loads(metadata["parts"])
        parts = tuple(_part(each, tensors, number, len(card.tiers)) for number, each in enumerate(described))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"router.artefact: {path} is not a scorer made by `gearshift router train`: {error}"
        ) from error
    return Artefact(Card(**asdict(card) | {"tiers": tuple(card.tiers)}), Learned(parts), _digest(content))


def _taken_apart(part: Linear | Trees) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    if isinstance(part, Trees):
        return {name: getattr(part, name) for name in Trees.__dataclass_fields__}, {"kind": part.kind}
    arrays = {name: getattr(part, name) for name in ARRAYS} | ({"idf": part.words.idf} if part.words else {})
    return arrays, {"kind": part.kind, "embedded": part.embedded, "terms": part.words.terms() if part.words else None}


def _part(described: dict[str, Any], tensors: dict[str, NDArray[Any]], number: int, tiers: int) -> Linear | Trees:
    if described["kind"] == Trees.kind:
        trees = Trees(**{name: tensors[f"{number}.{name}"] for name in Trees.__dataclass_fields__})
        trees.check(len(NAMES), tiers)
        return trees
    arrays = {name: tensors[f"{number}.{name}"] for name in ARRAYS}
    words = None
    if described["terms"] is not None:
        words = Words({term: place for place, term in enumerate(described["terms"])}, tensors[f"{number}.idf"])
        if words.idf.shape != (len(words.places),):
            raise ValueError(f"{words.idf.size} frequencies do not fit {len(words.places)} words")
    part = Linear(described["kind"], words, embedded=int(described["embedded"]), **arrays)
    width = part.center.size + part.embedded + (words.idf.size if words else 0)
    if part.weights.shape != (tiers, width) or part.bias.shape != (tiers,) or part.scale.shape != part.center.shape:
        raise ValueError(f"weights of {part.weights.shape} do not fit {tiers} tiers and {width} inputs")
    if part.center.size not in (0, len(feature_names(part.kind))):
        raise ValueError(
            f"{part.center.size} features, this program counts {len(feature_names(part.kind))}; train it anew"
        )
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise ValueError("numbers that are not finite")
    return part


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
