"""Releases on a suite of questions: the real gateway, asked over HTTP, with engines that echo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gearshift.eval import suite
from gearshift.eval.answered import Question
from gearshift.eval.suite import Asker
from gearshift.platform.errors import ConfigError

pytestmark = pytest.mark.anyio

QUESTIONS = [
    Question("a", "test", "text", "Say Paris", ("Paris",)),
    Question("b", "test", "number", "What is 2 + 40?", ("42",)),
    Question("c", "test", "number", "Say 7", ("7",)),
    Question("d", "test", "exact", "same", ("Same",)),
]


def asker(url: str, folder: Path, key: str = "gs-alice") -> Asker:
    return Asker(url, key, folder, max_tokens=16, streams=4)


def silent(stage: str, done: int, total: int) -> None:
    pass


async def test_a_release_is_graded_and_asked_again_only_when_it_has_changed(
    serve: Any, base_config: str, tmp_path: Path
) -> None:
    async with serve() as gateway:
        first = await asker(gateway.url, tmp_path).run("small-v1", QUESTIONS, silent)
        again = await asker(gateway.url, tmp_path).run("small-v1", QUESTIONS, silent)
        other = await asker(gateway.url, tmp_path).run("large-v1", QUESTIONS, silent)
    assert first.right == (True, False, True, True)
    assert (first.reused, again.reused, other.reused) == (0, 3, 0)
    assert again.right == first.right
    async with serve(
        base_config.replace("small-v1: {model: small, prompt: none", "small-v1: {model: small, prompt: polite")
    ) as gateway:
        changed = await asker(gateway.url, tmp_path).run("small-v1", QUESTIONS, silent)
    assert changed.fingerprint != first.fingerprint
    assert changed.reused == 0


async def test_what_can_t_be_asked_is_an_error_and_a_failed_question_is_wrong(serve: Any, tmp_path: Path) -> None:
    blocked = [*QUESTIONS, Question("e", "test", "text", "Say forbidden words", ("words",))]
    async with serve() as gateway:
        with pytest.raises(ConfigError, match=r"no model 'small-v9'"):
            await asker(gateway.url, tmp_path).run("small-v9", QUESTIONS, silent)
        with pytest.raises(ConfigError, match="key"):
            await asker(gateway.url, tmp_path, "gs-nobody").run("small-v1", QUESTIONS, silent)
        found = await asker(gateway.url, tmp_path).run("small-v1", blocked, silent)
    assert found.failed == 1
    assert found.right[4] is False
    report = suite.markdown("mine", blocked, [found, found])
    assert "| all | 5 | 60.0%" in report
    assert "+0.0 (+0.0 to +0.0) points | 1 |" in report
    assert "1 failed" in report


def test_intervals_are_those_of_the_books() -> None:
    low, middle, high = suite.share([True] * 8 + [False] * 2)
    assert (round(low, 3), middle, round(high, 3)) == (0.49, 0.8, 0.943)  # Wilson 1927
    better = [True] * 60 + [False] * 40
    worse = [True] * 40 + [False] * 60
    low, gap, high, p = suite.difference(better, worse)
    assert gap == pytest.approx(0.2)
    assert 0.1 < low < gap < high < 0.3
    assert p < 0.001
    assert suite.difference(better, better) == (0.0, 0.0, 0.0, 1.0)
