"""Keys and values in the CPU's memory, attended in place by `kernels/attention.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gearshift.platform.engine.kernels.attention import attend, write_kv
from gearshift.platform.engine.kv.cache import Array, join, kv_shape, split
from gearshift.platform.engine.rows import Ints, Rows
from gearshift.platform.engine.workers import Workers

STORED = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int8: np.int8}
TILE_ROWS = 48
"""Query rows (tokens x heads of a group) that go over a key together: they stay in the first-level cache."""
SHARED_WORK = 1 << 15
"""Below so many scores a layer and head, a second thread costs more than it brings."""


def flat(tensor: Tensor) -> Array:
    """The numbers of a contiguous tensor as the kernels see them: bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy().reshape(-1)


class Layer(NamedTuple):
    keys: Array
    values: Array
    key_scales: Array
    value_scales: Array


class Plan(NamedTuple):
    slots: Ints
    tables: Ints
    parts: list[Ints]  # tiles of each thread


class CpuCache:
    """Raises ValueError when the block size is not a multiple of 16."""

    def __init__(self, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype, threads: int) -> None:
        if block_size % 16:
            raise ValueError(f"block_size: must be a multiple of 16 on a CPU, got {block_size}")
        self.block_size = block_size
        self.kv_heads, self.dim = kv_shape(config)
        self.group = config.num_attention_heads // self.kv_heads
        planes = num_blocks * self.kv_heads * block_size
        scales = planes if dtype == torch.int8 else 0
        self.layers = [
            Layer(
                np.zeros(planes * self.dim, STORED[dtype]),
                np.zeros(planes * self.dim, STORED[dtype]),
                np.zeros(scales, np.float32),
                np.zeros(scales, np.float32),
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.workers = Workers(threads)

    def export(self, block: int) -> bytes:
        return join(self._parts(block))

    def restore(self, block: int, content: bytes) -> None:
        split(content, self._parts(block))

    def _parts(self, block: int) -> list[Array]:
        """Views of what belongs to a block."""
        tokens = self.kv_heads * self.block_size
        found = []
        for layer in self.layers:
            for array in layer:
                width = tokens if array is layer.key_scales or array is layer.value_scales else tokens * self.dim
                found.append(array[block * width : (block + 1) * width] if array.size else array)
        return found

    def prepare(self, rows: Rows) -> Plan:
        tiles = self._tiles(rows)
        work = np.cumsum(tiles[:, 2] * (tiles[:, 3] + tiles[:, 2]) * self.group)
        threads = self.workers.threads
        if threads == 1 or work[-1] < SHARED_WORK:
            return Plan(rows.slots, rows.tables, [tiles])
        cuts = np.searchsorted(work, work[-1] * np.arange(1, threads) / threads)
        return Plan(rows.slots, rows.tables, [part for part in np.split(tiles, cuts) if len(part)])

    def _tiles(self, rows: Rows) -> Ints:
        """[n, 4]: (sequence, first row, rows, position), as `attend` takes them."""
        size = max(1, TILE_ROWS // self.group)
        pieces = -(-rows.counts // size)
        sequence = np.repeat(np.arange(len(rows.counts)), pieces)
        offset = (np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * size
        count = np.minimum(size, rows.counts[sequence] - offset)
        return np.stack([sequence, rows.first[sequence] + offset, count, rows.starts[sequence] + offset], axis=1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float, window: int
    ) -> Tensor:
        tokens, heads, dim = query.shape
        packed = torch.cat([query, key, value], dim=1).float().contiguous()
        out = torch.empty(tokens, heads * dim)
        self.attend_packed(layer, flat(packed), plan, scale, window, flat(out))
        return out.view(tokens, heads, dim).to(query.dtype)

    def attend_packed(self, layer: int, packed: Array, plan: Plan, scale: float, window: int, out: Array) -> None:
        """packed: float32 [T, H + 2 * KH, D] of queries, keys, values; out: [T, H, D]; both flat."""
        store = self.layers[layer]
        heads = self.kv_heads * self.group
        stride = (heads + 2 * self.kv_heads) * self.dim
        shape = (self.kv_heads, self.dim, self.block_size)
        write_kv(packed, heads * self.dim, (heads + self.kv_heads) * self.dim, stride, plan.slots, *store, *shape)
        width, score_scale = plan.tables.shape[1], np.float32(scale)
        tables = plan.tables.reshape(-1)

        def part(tiles: Ints) -> None:
            attend(
                packed, stride, *store, tables, width, tiles, self.kv_heads, self.group, self.dim, self.block_size,
                window, score_scale, out,
            )  # fmt: skip

        self.workers.run(part, plan.parts)
