"""The path that serves any transformers causal LM whose attention goes through the attention interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gearshift.platform.engine.kv.cache import KVCache
from gearshift.platform.engine.rows import Rows
from gearshift.platform.engine.runners.linear import MIN_ROWS, Linear

ATTENTION = "gearshift_paged"


def paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface. query: [1, H, T, D]; key, value: [1, KH, T, D]; returns [1, T, H, D]."""
    cache, plan = kwargs["paged"]
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    return cache.attend(module.layer_idx, q, k, v, plan, scaling, kwargs.get("sliding_window") or 0).unsqueeze(0), None


class TransformersModel:
    """Rows to logits through the model's own forward: all rows are one sequence [1, T], only attention tells them apart."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    def logits(self, rows: Rows) -> Tensor:
        """[N, vocab] of the sampled rows."""
        device = self._model.device

        def put(numbers: Any) -> Tensor:
            return torch.from_numpy(numbers).to(device)

        logits: Tensor = self._model(
            input_ids=put(rows.tokens).unsqueeze(0),
            position_ids=put(rows.positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=put(rows.sampled) if len(rows.sampled) else slice(0, 1),
            paged=(self._cache, self._cache.prepare(rows)),
        ).logits[0]
        return logits[: len(rows.sampled)]


class QuantizedLinear(nn.Module):
    """A weight format of `linear.py` in the place of an `nn.Linear`."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(self._linear.takes)
        count = len(rows)
        if count < MIN_ROWS:
            rows = torch.cat([rows, rows.new_zeros(MIN_ROWS - count, rows.shape[1])])
        return self._linear(rows.contiguous(), count)[:count].to(x.dtype).view(*x.shape[:-1], -1)
