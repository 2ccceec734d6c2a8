from __future__ import annotations

import pytest
import torch

from gearshift.platform.engine.sampling import sample
from gearshift.platform.engine.watermark import detect, marked
from gearshift.platform.errors import InvalidRequest
from gearshift.platform.request import SamplingParams, Watermark

VOCAB = 1000
MARK = Watermark(key=2**62 + 7)


def written(mark: Watermark | None, count: int, temperature: float = 1.0) -> list[int]:
    """By a model that finds all tokens nearly as good."""
    draw, params = torch.Generator().manual_seed(1), SamplingParams(temperature=temperature, watermark=mark)
    output: list[int] = []
    for _ in range(count):
        output.append(sample(torch.randn(VOCAB, generator=draw), params, [5], output, seed=3))
    return output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_was_written_with_a_mark_is_known_again_and_nothing_else_is(temperature: float) -> None:
    theirs, ours = written(None, 200, temperature), written(MARK, 200, temperature)
    assert detect(ours, MARK, VOCAB).z > 6
    assert detect(ours, MARK, VOCAB).p < 1e-6
    assert abs(detect(theirs, MARK, VOCAB).z) < 4
    assert abs(detect(ours, Watermark(key=2**62 + 8), VOCAB).z) < 4


def test_a_part_of_a_text_is_enough_and_repeating_it_proves_no_more() -> None:
    ours = written(MARK, 200)
    part = detect(ours[60:140], MARK, VOCAB)
    assert part.z > 4
    assert detect(ours[60:140] * 3, MARK, VOCAB).tokens <= part.tokens + 1


def test_green_tokens_are_raised_and_the_logits_are_left_as_they_were() -> None:
    logits = torch.zeros(VOCAB)
    raised = marked(logits, MARK, before=5)
    assert (raised == MARK.strength).sum() == VOCAB * MARK.share
    assert (raised == 0).sum() == VOCAB * (1 - MARK.share)
    assert not logits.any()
    assert torch.equal(raised, marked(logits, MARK, before=5))
    assert not torch.equal(raised, marked(logits, MARK, before=6))


def test_of_a_short_text_nothing_is_said() -> None:
    with pytest.raises(InvalidRequest, match="15 tokens"):
        detect(list(range(15)), MARK, VOCAB)


def test_the_key_is_not_shown() -> None:
    assert str(MARK.key) not in repr(SamplingParams(watermark=MARK))
