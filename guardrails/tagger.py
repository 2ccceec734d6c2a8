"""Finds what has no form: who, where, which organization, when. Words are told apart by what surrounds them.

The encoder reads the text, and its states at several depths stand for each word (as in Peters et al. 2018, arXiv 1802.05365,
section 3: lower layers know spelling, higher ones the sense). A linear model over these, the neighbours' and the word's shape
gives each word a label of begin, inside or nothing; the likeliest sequence of labels in which nothing goes on that has not
begun is taken (Viterbi).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from gearshift.guardrails import artefact
from gearshift.guardrails.artefact import Card
from gearshift.guardrails.verdict import Span
from gearshift.platform.config import Embedding
from gearshift.platform.errors import ConfigError

Kind = Literal["person", "location", "organization", "date"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LABELS = ("", *(f"{part}{kind}" for kind in (*KINDS, "title", "nationality") for part in ("B-", "I-")))
"""The last two are only told apart from the others: no rule is about them."""
SPELLINGS = 256
"""Places that parts of a word's spelling are hashed to."""
DEPTHS = 4
"""Of the encoder, that `Embedder.words` tells the states of."""
MAX_CHARS = 20_000
"""Longer texts are not read: what has not been read has not passed."""
Floats = NDArray[np.floating[Any]]
_WORDS = re.compile(r"\w+|[^\w\s]")
_NEVER = -1e4
MOST_NUMBERS = 20
"""Characters that the numbers of a date may take on either side."""
_NUMBERS_BEFORE = re.compile(r"\b(?:\d{1,4}[-/.])+$")
_NUMBERS_AFTER = re.compile(r"(?:[ ,]{0,2}\d{1,2}(?:st|nd|rd|th)\b|[-/.]\d+|,? \d{1,2}\b(?!\s*[%$€])|,? \d{4}\b)+")


class Entity(msgspec.Struct, array_like=True, frozen=True):
    """Characters [start, end) of a text that name something."""

    kind: Kind
    start: int
    end: int


def words(text: str) -> list[Span]:
    """What gets a label: words, numbers, and each sign."""
    return [Span(*match.span()) for match in _WORDS.finditer(text)]


def features(text: str, places: Sequence[Span], states: Floats) -> Floats:
    """[words, n]. states: [words, depths * width], the encoder's."""
    shapes = np.array([_shape(text, places, at) for at in range(len(places))], dtype=np.float32)
    spelled = np.array([_spelled(text[start:end]) for start, end in places], dtype=np.float32)
    last = states[:, -states.shape[1] // DEPTHS :]
    near = [_shifted(last, 1), _shifted(last, -1)]
    return np.hstack([states, *near, shapes, *(_shifted(shapes, by) for by in (1, -1, 2, -2)), spelled])


def _shifted(rows: Floats, by: int) -> Floats:
    """Each row is that of the word so many before; zeros at the rim."""
    moved = np.zeros_like(rows)
    if by > 0:
        moved[by:] = rows[:-by]
    else:
        moved[:by] = rows[-by:]
    return moved


def _shape(text: str, places: Sequence[Span], at: int) -> list[float]:
    start, end = places[at]
    word, before = text[start:end], text[places[at - 1].end if at else 0 : start]
    digits = len(word) if word.isdigit() else 0
    return [
        word.islower(),
        len(word) > 1 and word.isupper(),
        word[0].isupper() and not word.isupper(),
        word.isdigit(),
        any(char.isdigit() for char in word),
        not word[0].isalnum(),
        word == ",",
        word == ".",
        at == 0 or text[start - 1] == "\n",
        len(word) == 1,
        len(word) == 2,
        len(word) >= 6,
        *(digits == length for length in range(1, 8)),
        digits >= 8,
        word in "-/",
        word in "'\"’",
        not word.isascii(),
        "\n" in before,
        not before and at > 0,
    ]


def _spelled(word: str) -> list[float]:
    found = [0.0] * SPELLINGS
    marked = f"^{word.lower()}$"
    parts = {marked} | {part for size in (2, 3, 4) for part in (marked[:size], marked[-size:])}
    for part in parts:
        found[zlib.crc32(part.encode()) % SPELLINGS] = 1.0
    return found


@dataclass(frozen=True, slots=True)
class Tagger:
    """weights: [n, labels]. bias: [labels]."""

    card: Card
    weights: Floats
    bias: Floats

    def tag(self, text: str, places: Sequence[Span], states: Floats) -> list[Entity]:
        """places: the text's words. states: as of `features`."""
        if not places:
            return []
        scores = features(text, places, states) @ self.weights.astype(np.float32) + self.bias
        return completed(text, entities(places, likeliest(scores)))


def likeliest(scores: Floats) -> list[int]:
    """The best sequence of labels by the sum of its scores [words, labels], in which I- goes on with what its forerunner is."""
    allowed = np.array([[_follows(one, other) for other in LABELS] for one in LABELS])
    best = np.where([label.startswith("I-") for label in LABELS], _NEVER, scores[0])
    came: list[NDArray[np.int64]] = []
    for row in scores[1:]:
        paths = best[:, np.newaxis] + np.where(allowed, 0.0, _NEVER)
        came.append(paths.argmax(axis=0))
        best = paths.max(axis=0) + row
    found = [int(best.argmax())]
    for back in reversed(came):
        found.append(int(back[found[-1]]))
    return found[::-1]


def _follows(one: str, other: str) -> bool:
    return not other.startswith("I-") or one[2:] == other[2:]


def entities(places: Sequence[Span], labels: Sequence[int]) -> list[Entity]:
    """One for each run of words that begins with B-."""
    starts = [at for at, label in enumerate(labels) if LABELS[label].startswith("B-")]
    found: list[Entity] = []
    for start, following in pairwise([*starts, len(labels)]):
        kind = LABELS[labels[start]][2:]
        length = next((n for n in range(1, following - start) if not labels[start + n]), following - start)
        if kind in KINDS:
            found.append(Entity(kind, places[start].start, places[start + length - 1].end))
    return found


def completed(text: str, found: Sequence[Entity]) -> list[Entity]:
    """Without signs at their beginning, and dates with the rest of their numbers."""
    whole = []
    for each in found:
        start, end = each.start, each.end
        while start < end and not (text[start].isalnum() or text[start] in "(#"):
            start += 1
        if each.kind == "date":
            if before := _NUMBERS_BEFORE.search(text, max(0, start - MOST_NUMBERS), start):
                start = before.start()
            if after := _NUMBERS_AFTER.match(text, end, end + MOST_NUMBERS):
                end = after.end()
        if start < end:
            whole.append(Entity(each.kind, start, end))
    return whole


def save(path: Path, tagger: Tagger) -> None:
    artefact.save(
        path, tagger.card, {"weights": tagger.weights.astype(np.float16), "bias": tagger.bias.astype(np.float32)}
    )


def load(path: Path) -> Tagger:
    """Raises `ConfigError` for a file that is missing, damaged, foreign, or of another format."""
    card, tensors = artefact.load(path)
    weights, bias = tensors.get("weights"), tensors.get("bias")
    if weights is None or bias is None or weights.ndim != 2 or bias.shape != (len(LABELS),):
        raise ConfigError(f"{path} is not a tagger; make one with `gearshift guardrails train personal`")
    if weights.shape[1] != len(LABELS) or not (np.isfinite(weights).all() and np.isfinite(bias).all()):
        raise ConfigError(f"{path}: its weights are not finite numbers for {len(LABELS)} labels; train it anew")
    return Tagger(card, weights, bias)


def tagger_of(settings: Embedding) -> Tagger:
    """The one that reads with this encoder. Raises `ConfigError`."""
    made = _shipped() if settings.tagger is None else load(Path(settings.tagger))
    if made.card.encoder != settings.source:
        raise ConfigError(
            f"embedding.tagger knows words of {made.card.encoder}, and embedding.source is {settings.source}; make one with "
            f"`gearshift guardrails train personal --encoder {settings.source}`"
        )
    return made


def _shipped() -> Tagger:
    with as_file(files("gearshift.guardrails") / "personal.safetensors") as path:
        return load(path)
