"""Sentence embeddings by an encoder of transformers: mean of the last hidden states over the text's tokens, length one.

Sentence-BERT (Reimers & Gurevych 2019, arXiv 1908.10084, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 256
BATCH = 32


class Embedder:
    """Loads an encoder from a folder. device: auto takes a GPU where there is one."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder).eval().to(device)
        self._device = device

    @property
    def width(self) -> int:
        return int(self._model.config.hidden_size)

    def embed(
        self, texts: Sequence[str], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> NDArray[np.float32]:
        """[n, width]. Texts of like length are computed together, so that little is padded."""
        import torch

        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        rows: dict[int, NDArray[np.float32]] = {}
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            inputs = self._tokenizer(
                [texts[i] for i in batch], padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            ).to(self._device)
            with torch.inference_mode():
                hidden = self._model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(2)
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            rows |= zip(batch, torch.nn.functional.normalize(mean, dim=1).cpu().numpy(), strict=True)
            progress(start + len(batch), len(order))
        return np.stack([rows[i] for i in range(len(texts))])
