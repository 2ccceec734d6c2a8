"""The trained half of the semantic cache: its file, its trees, and how it is trained."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from gearshift.eval import verifier_training
from gearshift.eval.paraphrases import Labelled, groups, read_pairs
from gearshift.platform.cache import verifier
from gearshift.platform.cache.paraphrase import Pair, read
from gearshift.platform.errors import ConfigError, InvalidRequest

ENCODER = "pypi:all-minilm-l6-v2"
WIDTH = 80


def by_letters(texts: Sequence[str]) -> NDArray[np.float32]:
    """Vectors of length one, of the pairs of letters in each text."""
    found = np.zeros((len(texts), WIDTH), np.float32)
    for row, text in zip(found, texts, strict=True):
        for first, then in pairwise(text):
            row[(ord(first) * 31 + ord(then)) % WIDTH] += 1
    lengths: NDArray[np.float32] = np.linalg.norm(found, axis=1, keepdims=True)
    return found / lengths


def labelled(count: int) -> list[Labelled]:
    """Half of them ask the same."""
    rng = random.Random(0)
    words = [f"{a}{b}o" for a in "bcdfghklmnprstvz" for b in ("a", "e", "i", "u")]
    pairs = []
    for number in range(count):
        first, then = rng.sample(words, 2)
        subject = f"{first} {rng.choice(words)} {number}x"
        same = number % 2 == 0
        other = f"How can I {subject} now?" if same else f"Why would anybody {then} {number}x at home?"
        pairs.append(Labelled(f"How do I {subject}?", other, same))
    return pairs


@pytest.fixture(scope="module")
def trained() -> verifier.Verifier:
    few = {**verifier_training.GROWN, "max_iter": 15}
    with (
        pytest.MonkeyPatch.context() as patch,
        threadpool_limits(1),
    ):  # few rows: threads would only wait for each other
        patch.setattr(verifier_training, "GROWN", few)
        patch.setattr(verifier_training, "LEAST", 300)
        return verifier_training.train(labelled(800), by_letters, ENCODER, 0.05, "made up")


def test_a_verifier_learns_keeps_what_it_promises_and_comes_back_from_its_file(
    trained: verifier.Verifier, tmp_path: Path
) -> None:
    card = trained.card
    assert card.false_hits[1] <= card.wanted
    assert card.recall[1] > 0.9
    trained.save(tmp_path / "v.safetensors")
    loaded = verifier.load(tmp_path / "v.safetensors", ENCODER)
    assert loaded.card == card
    fresh = [pair._replace(one=pair.one.replace("o", "e")) for pair in labelled(200)]
    judged = [verifier_training.judge(each, fresh, by_letters) for each in (trained, loaded)]
    assert judged[0] == judged[1]


def test_the_trees_say_what_the_library_says() -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier

    rng = np.random.default_rng(0)
    table = rng.normal(size=(3000, 6))
    same = table[:, 0] + table[:, 1] * table[:, 2] > 0
    with threadpool_limits(1):
        grown = HistGradientBoostingClassifier(max_iter=30, random_state=0).fit(table, same)
    forest = verifier_training._forest([trees[0].nodes for trees in grown._predictors], 1.0)
    forest.check(6, 1)
    ours = float(grown._baseline_prediction[0, 0]) + forest.leaves(table).sum(axis=1)[:, 0]
    np.testing.assert_allclose(ours, grown.decision_function(table), atol=1e-9)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "damaged"),
        (lambda path: path.write_text("{}"), "damaged"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: rewritten(path, format=99), "format 99"),
        (lambda path: rewritten(path, encoder="hf:org/other"), "gearshift cache train"),
        (lambda path: rewritten(path, colour="blue"), "is no verifier made by"),
        (lambda path: rewritten(path, {"topics": np.zeros((3, 5), np.float32)}), "is no verifier made by"),
    ],
)
def test_a_file_that_is_none_is_a_clear_error(
    damage: Any, said: str, trained: verifier.Verifier, tmp_path: Path
) -> None:
    path = tmp_path / "v.safetensors"
    trained.save(path)
    damage(path)
    with pytest.raises(ConfigError, match=said):
        verifier.load(path, ENCODER)


def rewritten(path: Path, tensors: dict[str, Any] | None = None, **card: Any) -> None:
    content = path.read_bytes()
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    changed = {"card": json.dumps(json.loads(metadata["card"]) | card)}
    path.write_bytes(safetensors.numpy.save(safetensors.numpy.load(content) | (tensors or {}), changed))


def test_the_one_that_is_shipped_loads_and_says_where_it_comes_from() -> None:
    found = verifier.load(verifier.SHIPPED, ENCODER)
    assert "Quora" in found.card.source
    assert found.card.false_hits[1] < 0.01
    one = np.eye(1, found.center.size, dtype=np.float32)[0]
    asked = read("What is the capital of France?")
    pairs = [
        Pair.of(asked, read(text)) for text in ("what's the capital of France", "What is the capital of 2 countries?")
    ]
    assert found.scores(pairs, one, np.stack([one, one])).tolist() == [np.inf, -np.inf]
    assert np.abs(found.topics @ found.topics.T - np.eye(len(found.topics))).max() < 1e-5  # as they were fitted


def test_a_threshold_counts_one_more_pair_in() -> None:
    scores = np.arange(1000.0)
    assert verifier_training.lowest(scores, 0.01) == 990.0  # 9 of 1,000 are above it, and one more may come
    with pytest.raises(InvalidRequest, match="bring more"):
        verifier_training.lowest(scores[:50], 0.01)


def test_pairs_that_share_a_question_stay_together_and_mistakes_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [("a b", "c", True), ("c", "d", False), ("e", "f", True), ("A  b!", "a b", False)]
    path.write_text("".join(json.dumps({"a": a, "b": b, "same": same}) + "\n" for a, b, same in rows))
    pairs = read_pairs(path)
    assert [pair[:3] for pair in pairs] == rows[:3]
    first, second, third = groups(pairs)
    assert first == second != third
    path.write_text('{"a": "x"}\n')
    with pytest.raises(InvalidRequest, match=r"pairs\.jsonl"):
        read_pairs(path)
    with pytest.raises(InvalidRequest, match="1000 of either"):
        verifier_training.train(pairs, by_letters, ENCODER, 0.1, "")
