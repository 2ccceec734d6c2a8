"""Sentence embeddings by an encoder of transformers: mean of the last hidden states over the text's tokens, length one.

Sentence-BERT (Reimers & Gurevych 2019, arXiv 1908.10084, section 3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 256
BATCH = 32
OVERLAP = 64
"""Tokens that two windows of a long text share."""


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

    def words(
        self,
        texts: Sequence[str],
        places: Sequence[Sequence[tuple[int, int]]],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[NDArray[np.float32]]:
        """Of each text [words, 4 * width]: the states of each word's tokens, averaged, at the bottom, the middle, below the top
        and at the top. places: [start, end) of the words, in order. All of a text is read, in windows that overlap."""
        read = [self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in texts]
        parts = [(i, *part) for i, each in enumerate(read) for part in _windows(len(each["input_ids"]))]
        parts.sort(key=lambda part: part[2] - part[1])
        states: list[Any] = [[None] * len(each["input_ids"]) for each in read]
        for at in range(0, len(parts), BATCH):
            batch = parts[at : at + BATCH]
            found = self._states([read[i]["input_ids"][start:end] for i, start, end, _, _ in batch])
            for (i, start, _, first, last), rows in zip(batch, found, strict=True):
                states[i][first:last] = rows[1 + first - start : 1 + last - start]
            progress(at + len(batch), len(parts))
        offsets = [each["offset_mapping"] for each in read]
        return [self._averaged(*each) for each in zip(places, offsets, states, strict=True)]

    def _states(self, tokens: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """[texts, tokens and what is put around them, 4 * width]."""
        import torch

        begin, end = self._tokenizer.cls_token_id, self._tokenizer.sep_token_id
        inputs = self._tokenizer.pad({"input_ids": [[begin, *each, end] for each in tokens]}, return_tensors="pt")
        with torch.inference_mode():
            layers = self._model(**inputs.to(self._device), output_hidden_states=True).hidden_states
        chosen = [layers[0], layers[len(layers) // 2], layers[-2], layers[-1]]
        found: NDArray[np.float32] = torch.cat(chosen, dim=2).float().cpu().numpy()
        return found

    def _averaged(
        self, places: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]], states: Sequence[Any]
    ) -> NDArray[np.float32]:
        """Zeros for a word that has no token."""
        sums = np.zeros((len(places), 4 * self.width), np.float32)
        counts = np.zeros(len(places), np.float32)
        starts = [start for start, _ in places]
        for (start, end), row in zip(offsets, states, strict=True):
            at = bisect_right(starts, start) - 1
            if end > start and 0 <= at < len(places) and start < places[at][1]:
                sums[at] += row
                counts[at] += 1
        sums /= np.maximum(counts, 1)[:, np.newaxis]
        return sums


def _windows(tokens: int) -> list[tuple[int, int, int, int]]:
    """Of so many tokens: [start, end) of what is read at once, and [first, last) of those whose states are taken from there."""
    size = MAX_TOKENS - 2
    found = []
    for start in range(0, max(1, tokens - OVERLAP), size - OVERLAP):
        end = min(tokens, start + size)
        first = start + OVERLAP // 2 if start else 0
        found.append((start, end, first, end if end == tokens else end - OVERLAP // 2))
    return found
