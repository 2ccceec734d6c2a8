"""What a trained rule is kept as: a file of numbers (safetensors) with a card in its metadata. Loading it executes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from gearshift.platform.errors import ConfigError

FORMAT = 1
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Card:
    """What a reader needs to know before trusting a classifier."""

    name: str
    rows: int
    sources: tuple[str, ...]
    """Data it was trained on, with the licence of each."""
    data: str
    """SHA-256 of the training texts and their labels."""
    encoder: str
    """Whose vectors it knows."""
    false_positives: float
    """Share of harmless texts with a score above 0.5, of texts it had not seen; of a tagger, of harmless characters that it takes
    for something."""
    recall: float
    """Share of the others; of a tagger, of labelled characters that it finds."""
    metrics: dict[str, float] = field(default_factory=dict)
    format: int = FORMAT


def save(path: Path, card: Card, tensors: Tensors) -> None:
    content = safetensors.numpy.save(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, {"card": json.dumps(asdict(card))}
    )
    path.write_bytes(content)


def load(path: Path) -> tuple[Card, dict[str, NDArray[Any]]]:
    """Raises `ConfigError` for a file that is missing, damaged, foreign, or of another format."""
    try:
        content = path.read_bytes()
        tensors = safetensors.numpy.load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        card = Card(**json.loads(metadata["card"]))
        card = replace(card, sources=tuple(card.sources))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged or is not a classifier: {error}") from error
    if card.format != FORMAT:
        raise ConfigError(f"{path} has format {card.format}, this program reads {FORMAT}; train it anew")
    return card, tensors
