"""Weight formats of a matrix product on the CPU. Each packs its weights once, in the order the library's kernels read.

Rows come in a buffer of at least `MIN_ROWS`, because the libraries' products of two or three rows are slower than of four.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gearshift.platform.engine.kernels.rows import ZERO_POINT, multiply_row, quantize, rescale
from gearshift.platform.engine.kv.cpu import flat
from gearshift.platform.engine.workers import Workers

MIN_ROWS = 4
SHARED_WEIGHTS = 1 << 20
"""Below so many weights, a second thread costs more than it brings."""


class Linear(Protocol):
    takes: torch.dtype
    """Number format of its rows."""

    def __call__(self, rows: Tensor, count: int) -> Tensor:
        """rows: [>= max(count, MIN_ROWS), in], `count` of them meant. Returns [>= count, out]."""
        ...


class PackedLinear:
    """float32 and bfloat16 through oneDNN, packed for it (packing anew in each product costs a third of the time)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.takes = weight.dtype
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, rows: Tensor, count: int) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows[: max(count, MIN_ROWS)], self._weight, self._bias, "none", [], ""
        )
        return product


def int8_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric, one scale an output channel. [out, in] -> int8 [out, in], float32 [out]."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1).clamp(min=1e-20) / 127
    return (weight / scales.unsqueeze(1)).round().to(torch.int8), scales


class Scratch:
    """Quantized rows on their way into a product, shared by all layers of a model: one product runs at a time. Owns the
    threads that share the products of a single row."""

    def __init__(self, max_rows: int, workers: Workers) -> None:
        self.workers = workers
        self._max_rows = max(max_rows, MIN_ROWS)
        self._rows: dict[int, Tensor] = {}
        self.scales: NDArray[np.float32] = np.zeros(self._max_rows, np.float32)

    def rows(self, width: int) -> Tensor:
        """uint8 [2 * max_rows, width]."""
        if width not in self._rows:
            self._rows[width] = torch.zeros(2 * self._max_rows, width, dtype=torch.uint8)
        return self._rows[width]


class Int8Linear:
    """int8 weights with one scale a channel; activations in one int8 term (8 bits) or two (15 bits) with one scale a row.

    A batch goes through torch's VNNI product, the terms as rows of one call; a single row through a kernel of our own,
    which is bound by memory where the library's is not. Both are exact in whole numbers, so they agree.
    """

    takes = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None, scratch: Scratch, terms: int = 2) -> None:
        self._terms = terms
        self._int8, self._scales = int8_weights(weight)
        self._packed = torch.ops.onednn.qlinear_prepack(self._int8, None)
        self._zeros = torch.zeros(len(self._scales), dtype=torch.int64)
        self._bias: NDArray[np.float32] = np.zeros(0, np.float32) if bias is None else bias.float().numpy()
        self._scratch = scratch
        self._rows = scratch.rows(weight.shape[1])
        self._row_scales = scratch.scales

    def __call__(self, rows: Tensor, count: int) -> Tensor:
        scales = self._row_scales[:count]
        quantize(flat(rows), rows.shape[1], self._terms, flat(self._rows), scales)
        products = self._one() if count == 1 else self._many(self._terms * count)
        rescale(flat(products), scales, self._terms, self._bias, products.shape[1])
        return products

    def _many(self, count: int) -> Tensor:
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            self._rows[: max(count, MIN_ROWS)], 1.0, ZERO_POINT, self._packed, self._scales, self._zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return product

    def _one(self) -> Tensor:
        count, width = self._int8.shape
        out = torch.empty(self._terms, count)
        arrays = flat(self._rows), flat(self._int8), flat(self._scales), width, self._terms

        def part(span: tuple[int, int]) -> None:
            multiply_row(*arrays, *span, flat(out))

        parts = self._scratch.workers.threads if count * width >= SHARED_WEIGHTS else 1
        cuts = [count * n // parts for n in range(parts + 1)]
        self._scratch.workers.run(part, list(itertools.pairwise(cuts)))
        return out


class Int4Linear:
    """4-bit weights in groups along the input, each with its own scale and zero (torch's CPU kernel): a quarter of the
    bytes for few streams; activations stay bfloat16."""

    takes = torch.bfloat16

    def __init__(self, weight: Tensor, bias: Tensor | None, group: int) -> None:
        self._group, self._bias = group, bias
        values, self._scales = int4_weights(weight, group)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)

    def __call__(self, rows: Tensor, count: int) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows[:count], self._packed, self._group, self._scales
        )
        return product if self._bias is None else product + self._bias


def int4_weights(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """[out, in] -> int32 [out, in] of 0..15, and bfloat16 [in / group, out, 2] of scale and zero, where
    `weight = scale * (value - 8) + zero`."""
    grouped = weight.float().unflatten(1, (-1, group))
    low, high = grouped.amin(dim=2), grouped.amax(dim=2)
    scale = ((high - low).clamp(min=1e-8) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    values = ((grouped - zero.unsqueeze(2)) / scale.unsqueeze(2) + 8).round().clamp(0, 15)
    return values.flatten(1).to(torch.int32), torch.stack([scale.T, zero.T], dim=2).bfloat16().contiguous()
