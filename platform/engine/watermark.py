"""A watermark in what is sampled, and how it is found again: the green list of Kirchenbauer et al. 2023 (arXiv 2301.10226,
algorithm 2), as transformers has it.

The token before seeds a draw of "green" tokens, whose logits are raised. A text that holds more of them than chance would was
written by whoever knows the key. The draws are made on the CPU whatever the model runs on, so that they are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, WatermarkDetector
from transformers.generation.logits_process import WatermarkLogitsProcessor

from gearshift.platform.errors import InvalidRequest
from gearshift.platform.request import Watermark

LEAST_TOKENS = 16
"""Of fewer nothing can be said."""


def marked(logits: Tensor, mark: Watermark, before: int) -> Tensor:
    """With the green tokens raised. logits: [vocab]. before: the token before the one that is to be drawn."""
    raised: Tensor = _processor(mark, logits.numel())(torch.tensor([[before]]), logits.unsqueeze(0))
    return raised.squeeze(0)


@lru_cache(8)
def _processor(mark: Watermark, vocab: int) -> Any:
    return WatermarkLogitsProcessor(vocab, "cpu", **_settings(mark))


def _settings(mark: Watermark) -> dict[str, Any]:
    return {
        "greenlist_ratio": mark.share,
        "bias": mark.strength,
        "hashing_key": mark.key,
        "seeding_scheme": "lefthash",
        "context_width": 1,
    }


@dataclass(frozen=True, slots=True)
class Found:
    """tokens: pairs of tokens that were looked at, each once. green: share of those whose second one is green. z: standard
    deviations above what chance gives (2301.10226, equation 3). p: that chance gives so much."""

    tokens: int
    green: float
    z: float
    p: float


def detect(ids: Sequence[int], mark: Watermark, vocab: int) -> Found:
    """Raises `InvalidRequest` for a text that is too short."""
    if len(ids) < LEAST_TOKENS:
        raise InvalidRequest(f"The text has {len(ids)} tokens; of fewer than {LEAST_TOKENS} nothing can be said.")
    shape = PreTrainedConfig(
        vocab_size=vocab, bos_token_id=vocab - 1
    )  # the detector drops it where a text begins with it
    detector = WatermarkDetector(shape, "cpu", _settings(mark), ignore_repeated_ngrams=True)
    told: Any = detector(torch.tensor([list(ids)]), return_dict=True)
    return Found(
        int(told.num_tokens_scored[0]), float(told.green_fraction[0]), float(told.z_score[0]), float(told.p_value[0])
    )


def tokens_of(text: str, folder: str) -> list[int]:
    """By the tokenizer of the weights in a folder."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
