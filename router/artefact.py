"""A trained scorer as a file: what it computes with, and a card that says what it is. Loading it executes nothing.

skops writes the parts without pickle; a file that holds any type beyond numbers, text and scikit-learn's vectorizer is refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gearshift import __version__
from gearshift.platform.errors import ConfigError
from gearshift.router.learned import Examples, Learned, Linear

FORMAT = 1


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
    import skops.io

    parts = [
        {name: getattr(part, name) for name in Linear.__dataclass_fields__ if name not in ("words", "kind")}
        | {"words": part.words, "kind": part.kind}
        for part in scorer.parts
    ]
    content = skops.io.dumps({"card": json.dumps(asdict(card)), "parts": parts}, compression=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return Artefact(card, scorer, _digest(content))


def load(path: Path) -> Artefact:
    """Raises `ConfigError` for a file that is missing, damaged, foreign, or made for another version of the format."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"router.artefact: {path}: {error.strerror}") from error
    loaded = _read(path, content)
    try:
        card = Card(**json.loads(loaded["card"]))
        if card.format != FORMAT:
            raise ConfigError(
                f"router.artefact: {path} has format {card.format}, this program reads {FORMAT}; train it anew"
            )
        scorer = Learned(tuple(_part(each, len(card.tiers)) for each in loaded["parts"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"router.artefact: {path} is not a scorer made by `gearshift router train`: {error}"
        ) from error
    return Artefact(Card(**asdict(card) | {"tiers": tuple(card.tiers)}), scorer, _digest(content))


def _read(path: Path, content: bytes) -> Any:
    import skops.io

    try:
        foreign = skops.io.get_untrusted_types(data=content)
    except Exception as error:  # a damaged file fails in any layer of zip and JSON
        raise ConfigError(f"router.artefact: {path} is damaged or is not a scorer: {error}") from error
    if foreign:
        raise ConfigError(f"router.artefact: {path} holds types that are not loaded: {', '.join(foreign)}")
    try:
        return skops.io.loads(content)
    except Exception as error:
        raise ConfigError(f"router.artefact: {path} is damaged: {error}") from error


def _part(fields: dict[str, Any], tiers: int) -> Linear:
    from sklearn.feature_extraction.text import TfidfVectorizer

    part = Linear(**fields)
    if part.words is not None and not isinstance(part.words, TfidfVectorizer):
        raise TypeError(f"words is a {type(part.words).__name__}")
    width = part.center.size + part.embedded + (len(part.words.vocabulary_) if part.words is not None else 0)
    if part.weights.shape != (tiers, width) or part.bias.shape != (tiers,):
        raise ValueError(f"weights of {part.weights.shape} do not fit {tiers} tiers and {width} inputs")
    if not (np.isfinite(part.weights).all() and np.isfinite(part.bias).all()):
        raise ValueError("weights that are not finite")
    return part


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
