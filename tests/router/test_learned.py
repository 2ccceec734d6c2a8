"""Trained scorers: what they learn, and that their files are loaded safely."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.feature_extraction.text import TfidfVectorizer

from gearshift.platform.errors import ConfigError
from gearshift.router import artefact
from gearshift.router.answers import Attempt, Certainty
from gearshift.router.artefact import Card, data_hash
from gearshift.router.features import NAMES, Query, features
from gearshift.router.learned import Examples, Kind, Learned, train
from gearshift.router.trees import Trees
from gearshift.router.words import Words

EASY = [f"What colour is the {thing}?" for thing in ("sky", "sea", "sun", "moon", "grass", "snow", "rose", "coal")]
HARD = [f"Calculate {n} * {n + 7} - {n * 3} and explain each step." for n in range(8)]


def examples(tiers: int = 2, copies: int = 4) -> Examples:
    """The cheapest tier knows the easy ones, the most expensive one all."""
    queries = [Query(f"{text} {n}") for n in range(copies) for text in EASY + HARD]
    easy = [1.0] * len(EASY) + [0.0] * len(HARD)
    low = np.array(easy * copies)
    return Examples(queries, np.array([low + (1 - low) * tier / (tiers - 1) for tier in range(tiers)]).T)


def card(scorer: Learned, data: Examples, **changes: Any) -> Card:
    names = tuple("abcdefgh"[: data.qualities.shape[1]])
    return Card(**{"kind": "tfidf", "tiers": names, "rows": len(data.queries), "data": data_hash(data), **changes})


@pytest.mark.parametrize("kind", ["features", "tfidf"])
def test_a_scorer_learns_who_can_answer_what(kind: Kind) -> None:
    scorer = train(kind, examples())
    assert scorer.score(Query("Calculate 81 * 3 and explain each step.")) > 0.3
    assert scorer.score(Query("What colour is the wood?")) < scorer.score(
        Query("Calculate 81 * 3 and explain each step.")
    )


def test_qualities_between_0_and_1_and_several_tiers() -> None:
    scorer = train("tfidf", examples(tiers=4))
    gains = scorer.gains(Query("Calculate 81 * 3 and explain each step."))
    assert gains[0] == 0.0
    assert list(gains) == sorted(gains)
    assert scorer.score(Query("x")) == scorer.gains(Query("x"))[-1]


def test_embeddings_are_learned_from_and_missing_ones_are_an_error() -> None:
    data = examples()
    vectors = [Query(q.text, embedding=(float("Calculate" in q.text), 1.0)) for q in data.queries]
    scorer = train("embedding", Examples(vectors, data.qualities))
    assert scorer.needs_embedding
    assert scorer.score(vectors[-1]) > scorer.score(vectors[0])
    with pytest.raises(ValueError, match="embedding"):
        train("embedding", data)


def test_where_there_is_no_vector_a_score_is_made_of_the_rest() -> None:
    data = examples()
    vectors = [dataclasses.replace(q, embedding=(float("Calculate" in q.text), 1.0)) for q in data.queries]
    scorer = train("semantic", Examples(vectors, data.qualities))
    alone = train("features", data)
    asked = Query("Calculate 81 * 3 and explain each step.")
    assert scorer.needs_embedding
    assert scorer.score(asked) == alone.score(asked)
    assert scorer.score(dataclasses.replace(asked, embedding=(1.0, 1.0))) != alone.score(asked)
    with pytest.raises(ValueError, match="vectors"):
        train("embedding", Examples(vectors, data.qualities)).score(asked)


def test_a_judge_reads_the_answer() -> None:
    sure, unsure = Certainty([-0.05] * 9, [0.1] * 9), Certainty([-1.5] * 9, [2.0] * 9)
    queries = [Query(f"Question {n}?", attempt=Attempt(f"answer {n}", sure if n % 2 else unsure)) for n in range(60)]
    judge = train("answer", Examples(queries, np.array([[float(n % 2), 1.0] for n in range(60)])))
    good, bad = (judge.score(Query("New?", attempt=Attempt("answer", certainty))) for certainty in (sure, unsure))
    assert good < 0.3 < bad
    with pytest.raises(ValueError, match="answer"):
        judge.score(Query("New?"))


def test_too_few_labels_and_labels_that_say_nothing() -> None:
    with pytest.raises(ValueError, match="at least 20"):
        train("tfidf", Examples([Query("a")] * 5, np.ones((5, 2))))
    always = train("features", Examples([Query(f"q {n}") for n in range(30)], np.ones((30, 2))))
    assert always.score(Query("q")) == pytest.approx(0.0)


def test_features_are_finite_and_have_names() -> None:
    for text in ("", "?", "x" * 5000, "ünïcode 数 4*4", "a\n" * 50):
        numbers = features(Query(text))
        assert numbers.shape == (len(NAMES),)
        assert np.isfinite(numbers).all()


def test_a_saved_scorer_is_the_same_one(tmp_path: Path) -> None:
    data = examples(tiers=3)
    scorer = train("tfidf", data)
    saved = artefact.save(tmp_path / "a.safetensors", scorer, card(scorer, data, metrics={"apgr": 0.7}))
    loaded = artefact.load(tmp_path / "a.safetensors")
    assert loaded.digest == saved.digest
    assert loaded.card == saved.card
    assert loaded.card.tiers == ("a", "b", "c")
    assert loaded.scorer.gains(Query("Calculate 3 * 4")) == scorer.gains(Query("Calculate 3 * 4"))


def test_other_data_has_another_hash() -> None:
    assert data_hash(examples()) == data_hash(examples()) != data_hash(examples(tiers=3))


def foreign(metadata: dict[str, str] | None) -> bytes:
    return safetensors.numpy.save({"0.bias": np.zeros(2)}, metadata)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda content: b"", "damaged"),
        (lambda content: content[: len(content) // 2], "damaged"),
        (lambda content: content[:-8], "damaged"),
        (lambda content: b"#!/bin/sh\necho hi\n", "damaged or is not a scorer"),
        (lambda content: pickle.dumps({"card": "{}"}), "damaged or is not a scorer"),
        (lambda content: foreign(None), "damaged or is not a scorer"),
        (lambda content: foreign({"something": "else"}), "not a scorer made by"),
        (lambda content: foreign({"card": "{}", "parts": "[]"}), "not a scorer made by"),
    ],
)
def test_damaged_and_foreign_files_are_clear_errors(tmp_path: Path, damage: Any, told: str) -> None:
    data, path = examples(), tmp_path / "a.safetensors"
    scorer = train("tfidf", data)
    artefact.save(path, scorer, card(scorer, data))
    artefact.load(path)  # whole, it loads
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=told) as caught:
        artefact.load(path)
    assert str(path) in caught.value.message


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_in_the_place_of_a_scorer_is_not_executed(tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "executed"))
    (tmp_path / "a.safetensors").write_bytes(trap)
    with pytest.raises(ConfigError, match="damaged or is not a scorer"):
        artefact.load(tmp_path / "a.safetensors")
    assert not (tmp_path / "executed").exists()
    pickle.loads(trap)
    assert (tmp_path / "executed").exists()  # the trap works


def test_words_are_counted_as_the_library_does() -> None:
    texts = [query.text for query in examples().queries] + ["Ünï code, x y; two two two words?", "", "1 + 1 = 22"]
    library = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2)
    theirs = library.fit_transform(texts).toarray()
    words = Words.of(library)
    for text, expected in zip([*texts, "unseen entirely"], [*theirs, np.zeros(theirs.shape[1])], strict=True):
        places, values = words.row(text)
        ours = np.zeros(theirs.shape[1])
        ours[places] = values
        np.testing.assert_allclose(ours, expected, atol=1e-12)


def test_weights_that_do_not_fit_and_other_formats_are_refused(tmp_path: Path) -> None:
    data, path = examples(), tmp_path / "a.safetensors"
    scorer = train("tfidf", data)
    artefact.save(path, scorer, card(scorer, data, tiers=("a", "b", "c")))
    with pytest.raises(ConfigError, match="do not fit 3 tiers"):
        artefact.load(path)
    artefact.save(path, scorer, card(scorer, data, format=99))
    with pytest.raises(ConfigError, match="format 99"):
        artefact.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        artefact.load(tmp_path / "missing.safetensors")


def test_trees_are_read_as_the_library_reads_them() -> None:
    data = examples(tiers=3)
    rows = np.array([features(query) for query in data.queries])
    forest = ExtraTreesRegressor(20, min_samples_leaf=3, random_state=1).fit(rows, data.qualities)
    trees = Trees.of(forest)
    queries = [*data.queries, Query(""), Query("Something else entirely, 7 of them?\nA. one\nB. two")]
    theirs = forest.predict(np.array([features(query) for query in queries]))
    np.testing.assert_allclose(trees.qualities(queries), theirs, atol=1e-12)
    roots = trees.values[trees.roots].mean(axis=0)
    told = sum(weight for _, weight in trees.why(queries[0]))
    assert told == pytest.approx(float((theirs[0][-1] - theirs[0][0]) - (roots[-1] - roots[0])))


def test_trees_over_vectors_are_the_same_after_a_file(tmp_path: Path) -> None:
    data, path, rng = examples(), tmp_path / "a.safetensors", np.random.default_rng(0)
    vectors = [dataclasses.replace(query, embedding=tuple(rng.normal(size=30).tolist())) for query in data.queries]
    scorer = train("semantic", Examples(vectors, data.qualities))
    artefact.save(path, scorer, card(scorer, data, kind="semantic"))
    loaded = artefact.load(path).scorer
    assert loaded.needs_embedding
    gains = [loaded.gains(query) for query in vectors]
    assert gains == [scorer.gains(query) for query in vectors]
    plain, trees = scorer.parts
    assert isinstance(trees, Trees)
    for axes in (trees.axes * np.nan, trees.axes[0]):
        artefact.save(path, Learned((plain, dataclasses.replace(trees, axes=axes))), card(scorer, data))
        with pytest.raises(ConfigError, match="trees"):
            artefact.load(path)


def test_saved_trees_are_the_same_and_broken_ones_are_refused(tmp_path: Path) -> None:
    data, path = examples(), tmp_path / "a.safetensors"
    scorer = train("blend", data)
    artefact.save(path, scorer, card(scorer, data, kind="blend"))
    query = Query("Calculate 3 * 4")
    assert artefact.load(path).scorer.gains(query) == scorer.gains(query)
    assert artefact.load(path).scorer.why(query) == scorer.why(query)
    words, trees = scorer.parts
    assert isinstance(trees, Trees)
    inner = int(np.flatnonzero(trees.feature >= 0)[0])
    for changes in (
        {"left": np.where(np.arange(len(trees.left)) == inner, inner, trees.left).astype(np.int32)},  # for ever
        {"right": trees.right + len(trees.right)},
        {"feature": np.where(trees.feature >= 0, 99, -1).astype(np.int32)},
        {"values": trees.values[:, :1]},
        {"values": trees.values * np.nan},
        {"roots": trees.roots - 1},
        {"threshold": trees.threshold[:-1]},
    ):
        broken = Learned((words, dataclasses.replace(trees, **changes)))
        artefact.save(path, broken, card(scorer, data))
        with pytest.raises(ConfigError, match="trees"):
            artefact.load(path)
