"""Trains what finds names, places, organizations and dates, and measures personal data entity by entity.

As in guard_training.py: what is chosen is chosen on texts made of templates that the model which read them had not seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gearshift.eval import guard_data
from gearshift.guardrails.artefact import Card
from gearshift.guardrails.tagger import KINDS, LABELS, Entity, Tagger, completed, entities, features, likeliest, words
from gearshift.guardrails.verdict import Span
from gearshift.platform.errors import ConfigError

Floats = NDArray[np.floating[Any]]
States = Callable[[Sequence[str], Sequence[Sequence[Span]]], Sequence[Floats]]
"""`Embedder.words`."""
SOURCES = ("microsoft/presidio-research, MIT",)
FOLDS = 5
EPOCHS, BATCH, RATE, DECAY, DROPOUT = 12, 256, 1e-3, 0.3, 0.2
NAMED = {
    "PERSON": "person",
    "ADDRESS": "location",
    "STREET_ADDRESS": "location",
    "LOCATION": "location",
    "GPE": "location",
    "ZIP_CODE": "location",
    "ORGANIZATION": "organization",
    "DATE_TIME": "date",
    "NRP": "nationality",
    "TITLE": "title",
    "PREFIX": "title",
}
"""What the data call it, and we."""
SILENCES = np.arange(0.0, 12.1, 0.5)
"""What may be added to the score of no label."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    places: list[Span]
    spans: list[tuple[Span, str]]
    """Labelled, in the words of the data."""
    group: str
    """Of texts that were made of the same template."""


def read(folder: Path) -> list[Text]:
    """Raises `ConfigError`."""
    rows = guard_data.read(folder, "pii")
    return [
        Text(each["text"], words(each["text"]), [(Span(a, b), kind) for a, b, kind in each["spans"]], each["template"])
        for each in rows
        if words(each["text"])
    ]


def labels(text: Text) -> NDArray[np.int64]:
    """[words], places in `LABELS`."""
    found = np.zeros(len(text.places), dtype=np.int64)
    for span, called in text.spans:
        if (kind := NAMED.get(called)) is None:
            continue
        inside = [at for at, place in enumerate(text.places) if place.start < span.end and span.start < place.end]
        for at in inside:
            found[at] = LABELS.index(("B-" if at == inside[0] else "I-") + kind)
    return found


def fit(inputs: Floats, wanted: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Weights [n, labels] and bias of a linear model of inputs [words, n], by AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101)
    with dropout."""
    import torch

    draw = torch.Generator().manual_seed(0)
    middle, spread = inputs.mean(axis=0), inputs.std(axis=0) + 1e-3
    given = torch.from_numpy(((inputs - middle) / spread).astype(np.float32))
    target = torch.from_numpy(wanted)
    model = torch.nn.Linear(given.shape[1], len(LABELS))
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    steps = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(given), generator=draw).split(BATCH):
            kept = torch.rand((len(batch), given.shape[1]), generator=draw) > DROPOUT
            loss = torch.nn.functional.cross_entropy(model(given[batch] * kept / (1 - DROPOUT)), target[batch])
            steps.zero_grad()
            loss.backward()
            steps.step()
    weights = model.weight.detach().numpy().T / spread[:, np.newaxis]
    return weights, model.bias.detach().numpy() - middle @ weights


def unseen_scores(texts: Sequence[Text], inputs: Sequence[Floats]) -> list[Floats]:
    """[words, labels] of each text, by models that saw no text of its template."""
    from sklearn.model_selection import GroupKFold

    found: list[Floats] = [np.empty(0)] * len(texts)
    wanted = [labels(text) for text in texts]
    groups = [text.group for text in texts]
    for train, test in GroupKFold(FOLDS, shuffle=True, random_state=0).split(groups, groups=groups):
        weights, bias = fit(np.vstack([inputs[i] for i in train]), np.concatenate([wanted[i] for i in train]))
        for i in test:
            found[i] = inputs[i] @ weights + bias
    return found


def tagged(texts: Sequence[Text], scores: Sequence[Floats], silence: float) -> list[list[Entity]]:
    quiet = silence * (np.arange(len(LABELS)) == 0)
    return [
        completed(text.text, entities(text.places, likeliest(row + quiet)))
        for text, row in zip(texts, scores, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Quality:
    """Of what is found in texts. An entity is found where one of its kind overlaps it, and exactly where it has the same ends."""

    precision: float
    recall: float
    f1: float
    exact_f1: float
    leaked: float
    """Share of labelled characters that are in nothing found."""
    over: float
    """Share of all other characters that are."""


def quality(texts: Sequence[Text], found: Sequence[Sequence[tuple[Span, str]]], named: dict[str, str]) -> Quality:
    """found: of each text, spans and kinds. named: the data's words for kinds; what is not in it counts as its own."""
    hits = missed = wrong = exact = leaked = labelled = over = free = 0
    for text, ours in zip(texts, found, strict=True):
        theirs = [(span, named.get(kind, kind)) for span, kind in text.spans]
        met = sum(any(_meet(one, other) for other in ours) for one in theirs)
        hits, missed = hits + met, missed + len(theirs) - met
        wrong += sum(not any(_meet(one, other) for one in theirs) for other in ours)
        exact += len({*theirs} & {*ours})
        true, said = _covered(text.text, theirs), _covered(text.text, ours)
        leaked, labelled = leaked + int((true & ~said).sum()), labelled + int(true.sum())
        over, free = over + int((said & ~true).sum()), free + int((~true).sum())
    ours_all, theirs_all = sum(map(len, found)), hits + missed
    return Quality(
        precision=1 - wrong / max(1, ours_all),
        recall=hits / max(1, theirs_all),
        f1=2 * hits / max(1, 2 * hits + wrong + missed),
        exact_f1=2 * exact / max(1, ours_all + theirs_all),
        leaked=leaked / max(1, labelled),
        over=over / max(1, free),
    )


def _meet(one: tuple[Span, str], other: tuple[Span, str]) -> bool:
    return one[1] == other[1] and one[0].start < other[0].end and other[0].start < one[0].end


def _covered(text: str, spans: Sequence[tuple[Span, str]]) -> NDArray[np.bool_]:
    found = np.zeros(len(text), dtype=bool)
    for span, _ in spans:
        found[span.start : span.end] = True
    return found


def as_spans(found: Sequence[Entity]) -> list[tuple[Span, str]]:
    return [(Span(each.start, each.end), each.kind) for each in found]


def named_only(texts: Sequence[Text]) -> list[Text]:
    """With the labels of what the tagger looks for."""
    return [replace(text, spans=[each for each in text.spans if NAMED.get(each[1]) in KINDS]) for text in texts]


def silence(texts: Sequence[Text], scores: Sequence[Floats], most: float) -> tuple[float, Quality]:
    """The least that takes at most a share `most` of harmless characters for something."""
    asked = named_only(texts)
    for amount in SILENCES:
        found = [as_spans(each) for each in tagged(texts, scores, float(amount))]
        reached = quality(asked, found, NAMED)
        if reached.over <= most:
            break
    return float(amount), reached


def inputs_of(texts: Sequence[Text], states: States) -> list[Floats]:
    read = states([text.text for text in texts], [text.places for text in texts])
    return [features(text.text, text.places, each) for text, each in zip(texts, read, strict=True)]


def train(folder: Path, states: States, encoder: str, most_over: float) -> Tagger:
    """most_over: share of harmless characters that may be taken for something. Raises `ConfigError`."""
    texts = read(folder)
    if len({text.group for text in texts}) < FOLDS:
        raise ConfigError(f"{folder}: pii.jsonl.gz has texts of fewer than {FOLDS} templates")
    inputs = inputs_of(texts, states)
    amount, reached = silence(texts, unseen_scores(texts, inputs), most_over)
    wanted = [labels(text) for text in texts]
    weights, bias = fit(np.vstack(inputs), np.concatenate(wanted))
    digest = hashlib.sha256(json.dumps([[text.text, text.spans] for text in texts]).encode()).hexdigest()
    card = Card(
        name="personal",
        rows=len(texts),
        sources=SOURCES,
        data=f"sha256:{digest}",
        encoder=encoder,
        false_positives=round(reached.over, 4),
        recall=round(1 - reached.leaked, 4),
        metrics={"f1": round(reached.f1, 4), "exact_f1": round(reached.exact_f1, 4)},
    )
    return Tagger(card, weights, bias + amount * (np.arange(len(LABELS)) == 0))
