from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.guardrails import tagger as files
from gearshift.guardrails.artefact import Card
from gearshift.guardrails.tagger import (
    LABELS,
    Entity,
    Tagger,
    completed,
    entities,
    features,
    likeliest,
    tagger_of,
    words,
)
from gearshift.guardrails.verdict import Span
from gearshift.platform.config import Embedding
from gearshift.platform.embedding import Embedder
from gearshift.platform.errors import ConfigError
from gearshift.platform.weights import source

CARD = Card("personal", 2, ("own",), "sha256:0", "pypi:enc", 0.01, 0.9)


def scored(*labels: str) -> np.ndarray:
    return np.array([[float(label == wanted) for label in LABELS] for wanted in labels])


def test_a_text_is_cut_into_words_numbers_and_signs() -> None:
    text = "Ann's flat: 12B!"
    assert [text[start:end] for start, end in words(text)] == ["Ann", "'", "s", "flat", ":", "12B", "!"]


@settings(deadline=None)
@given(st.text(max_size=80))
def test_every_word_has_features_of_one_length(text: str) -> None:
    one = features("x", [Span(0, 1)], np.zeros((1, 8), np.float32))
    if places := words(text):
        found = features(text, places, np.zeros((len(places), 8), np.float32))
        assert found.shape == (len(places), one.shape[1])


def test_nothing_goes_on_that_has_not_begun() -> None:
    scores = scored("", "I-person", "I-person", "B-date", "I-person")
    assert [LABELS[label] for label in likeliest(scores)] != ["", "I-person", "I-person", "B-date", "I-person"]
    found = likeliest(scored("B-person", "I-person", "", "B-date", "B-date"))
    assert [LABELS[label] for label in found] == ["B-person", "I-person", "", "B-date", "B-date"]


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=len(LABELS), max_size=len(LABELS)), min_size=1, max_size=12))
def test_the_likeliest_labels_always_make_sense(scores: list[list[float]]) -> None:
    labels = [LABELS[label] for label in likeliest(np.array(scores))]
    for before, label in zip(["", *labels], labels, strict=False):
        assert not label.startswith("I-") or before[2:] == label[2:]


def test_entities_end_where_nothing_follows_and_titles_are_none() -> None:
    places = words("Dr. Ann Lee met Bo today")
    labels = ["B-title", "I-title", "B-person", "I-person", "", "B-person", "B-date"]
    found = entities(places, [LABELS.index(label) for label in labels])
    assert found == [Entity("person", 4, 11), Entity("person", 16, 18), Entity("date", 19, 24)]


@pytest.mark.parametrize(
    ("text", "found", "whole"),
    [
        ("Born on 12/04/1987 in Rome", Entity("date", 14, 18), "12/04/1987"),
        ("Since March 3, 2019 or so", Entity("date", 6, 11), "March 3, 2019"),
        ("On June 5th.", Entity("date", 3, 7), "June 5th"),
        ("Mr. Chen", Entity("person", 2, 8), "Chen"),
        ("Bo 1987", Entity("person", 0, 2), "Bo"),
    ],
)
def test_dates_take_all_their_numbers_and_nothing_begins_with_a_sign(text: str, found: Entity, whole: str) -> None:
    [each] = completed(text, [found])
    assert text[each.start : each.end] == whole
    assert completed("...", [Entity("person", 0, 3)]) == []


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder(source.ensure(source.parse(Embedding().source)).path)


def tag(embedder: Embedder, text: str) -> list[tuple[str, str]]:
    places = words(text)
    found = tagger_of(Embedding()).tag(text, places, embedder.words([text], [places])[0])
    return [(each.kind, text[each.start : each.end]) for each in found]


def test_the_shipped_tagger_tells_names_places_and_dates(embedder: Embedder) -> None:
    found = tag(embedder, "My name is Johanna Berger and I live at 12 Harbour Street, Bristol since March 3, 2019.")
    assert ("person", "Johanna Berger") in found
    assert any(kind == "location" and "Harbour" in said for kind, said in found)
    assert any(kind == "date" and "2019" in said for kind, said in found)
    assert tag(embedder, "How do I sort a list of numbers in Python?") == []
    assert tag(embedder, "") == []


def test_all_of_a_long_text_is_read(embedder: Embedder) -> None:
    text = "The weather is fine today. " * 150 + "Please call Johanna Berger."
    assert ("person", "Johanna Berger") in tag(embedder, text)


def test_a_text_reads_the_same_alone_and_among_others(embedder: Embedder) -> None:
    texts = ["Ask Ann Lee.", "A much longer text that makes the shorter ones wait for its padding, in Bristol.", "x"]
    places = [words(text) for text in texts]
    together = embedder.words(texts, places)
    for text, place, states in zip(texts, places, together, strict=True):
        np.testing.assert_allclose(embedder.words([text], [place])[0], states, atol=1e-4)


def test_what_is_saved_is_loaded_and_what_is_no_tagger_is_refused(tmp_path: Path) -> None:
    made = Tagger(CARD, np.ones((7, len(LABELS)), np.float32), np.zeros(len(LABELS), np.float32))
    path = tmp_path / "t.safetensors"
    files.save(path, made)
    assert files.load(path).card == CARD
    np.testing.assert_array_equal(files.load(path).weights, made.weights)
    files.save(path, Tagger(CARD, made.weights * np.inf, made.bias))
    with pytest.raises(ConfigError, match="finite"):
        files.load(path)
    files.save(path, Tagger(CARD, made.weights, made.bias[:3]))
    with pytest.raises(ConfigError, match="not a tagger"):
        files.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        files.load(tmp_path / "none")


def test_a_tagger_of_another_encoder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"knows words of pypi:all-minilm-l6-v2, and embedding.source is pypi:other"):
        tagger_of(Embedding(source="pypi:other"))
