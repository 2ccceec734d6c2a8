"""Keys and values in plain torch, on any device: the reference. It copies each history and pads decodes to the longest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gearshift.platform.engine.kv.cache import join, kv_shape, split
from gearshift.platform.engine.rows import Rows


@dataclass(slots=True)
class Piece:
    """Rows of one sequence, its history's slots [L], and the positions of the rows [n, 1]."""

    rows: slice
    slots: Tensor
    positions: Tensor


@dataclass(slots=True)
class Plan:
    write: Tensor  # [T]
    pieces: list[Piece]


class SlotCache:
    """Token i of a sequence is at slot `block * block_size + i % block_size`."""

    def __init__(self, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        heads, dim = kv_shape(config)
        shape = (num_blocks * block_size, heads, dim)
        self.device = device
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]

    def export(self, block: int) -> bytes:
        parts = [
            tensor[block * self.block_size : (block + 1) * self.block_size] for tensor in (*self.keys, *self.values)
        ]
        return join([part.contiguous().view(torch.uint8).cpu().numpy().reshape(-1) for part in parts])

    def restore(self, block: int, content: bytes) -> None:
        parts = [
            tensor[block * self.block_size : (block + 1) * self.block_size] for tensor in (*self.keys, *self.values)
        ]
        arrays = [np.empty(part.numel() * part.element_size(), np.uint8) for part in parts]
        split(content, arrays)
        for part, array in zip(parts, arrays, strict=True):
            part.copy_(torch.from_numpy(array).view(part.dtype).view(part.shape))

    def prepare(self, rows: Rows) -> Plan:
        pieces = []
        tables = torch.from_numpy(rows.tables)
        offsets = torch.arange(self.block_size)
        for table, first, count, start in zip(tables, rows.first, rows.counts, rows.starts, strict=True):
            slots = (table.unsqueeze(1) * self.block_size + offsets).flatten()[: start + count]
            positions = torch.arange(start, start + count).unsqueeze(1)
            pieces.append(Piece(slice(first, first + count), slots.to(self.device), positions.to(self.device)))
        return Plan(torch.from_numpy(rows.slots).to(self.device), pieces)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float, window: int
    ) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, plan.write, key.to(keys.dtype))
        values.index_copy_(0, plan.write, value.to(values.dtype))
        out = torch.empty_like(query)
        groups = query.shape[1] // keys.shape[1]
        for piece in plan.pieces:
            k, v = (
                part[piece.slots].to(query.dtype).transpose(0, 1).repeat_interleave(groups, dim=0)
                for part in (keys, values)
            )
            seen = torch.arange(piece.slots.numel(), device=self.device)
            mask = seen <= piece.positions
            if window:
                mask &= seen > piece.positions - window
            q = query[piece.rows].transpose(0, 1)
            out[piece.rows] = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[
                0
            ].transpose(0, 1)
        return out
