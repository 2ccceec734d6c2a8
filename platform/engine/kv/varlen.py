"""Keys and values in a GPU's memory, attended in place by torch's fused kernel for sequences of different lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from gearshift.platform.engine.kv.cache import join, kv_shape, split
from gearshift.platform.engine.rows import Rows
from gearshift.platform.errors import ConfigError


@dataclass(slots=True)
class Plan:
    write: Tensor  # [T]
    starts: Tensor  # [S + 1] cumulative rows
    lengths: Tensor  # [S] tokens of each sequence after this step
    tables: Tensor  # [S, W]
    longest_query: int
    longest_key: int


class VarlenCache:
    """[blocks, block_size, KV heads, dim] a layer. Raises `ConfigError` when the kernel refuses the shapes."""

    def __init__(self, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        heads, dim = kv_shape(config)
        shape = (num_blocks, block_size, heads, dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self._try(config.num_attention_heads, block_size)

    def _try(self, heads: int, block_size: int) -> None:
        one = torch.tensor([0, 1], dtype=torch.int32, device=self.device)
        probe = Plan(one[:1].long(), one, one[1:], one[:1].view(1, 1), 1, 1)
        key = self.keys[0][0, :1].clone()
        try:
            self.attend(0, key.repeat_interleave(heads // key.shape[1], dim=1), key, key, probe, 1.0, 0)
        except RuntimeError as error:
            raise ConfigError(
                f"block_size: this GPU's paged attention refuses blocks of {block_size} tokens ({error}); try block_size: 256"
            ) from error

    def export(self, block: int) -> bytes:
        parts = [tensor[block] for tensor in (*self.keys, *self.values)]
        return join([part.contiguous().view(torch.uint8).cpu().numpy().reshape(-1) for part in parts])

    def restore(self, block: int, content: bytes) -> None:
        parts = [tensor[block] for tensor in (*self.keys, *self.values)]
        arrays = [np.empty(part.numel() * part.element_size(), np.uint8) for part in parts]
        split(content, arrays)
        for part, array in zip(parts, arrays, strict=True):
            part.copy_(torch.from_numpy(array).view(part.dtype).view(part.shape))

    def prepare(self, rows: Rows) -> Plan:
        def put(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.as_tensor(values).to(self.device, dtype)

        lengths = rows.starts + rows.counts
        starts = [0, *(rows.first + rows.counts).tolist()]
        return Plan(
            put(rows.slots, torch.long),
            put(starts),
            put(lengths),
            put(rows.tables),
            int(rows.counts.max()),
            int(lengths.max()),
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float, window: int
    ) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        keys.flatten(0, 1).index_copy_(0, plan.write, key)
        values.flatten(0, 1).index_copy_(0, plan.write, value)
        out = varlen_attn(
            query.contiguous(), keys, values, plan.starts, None, plan.longest_query, plan.longest_key,
            scale=scale, window_size=(window - 1 if window else -1, 0), enable_gqa=True,
            seqused_k=plan.lengths, block_table=plan.tables, num_splits=1,
        )  # fmt: skip  # num_splits 1: a request's bits do not depend on its neighbours
        assert isinstance(out, Tensor)
        return out
