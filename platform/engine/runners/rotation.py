"""Turns a Llama-like model so that one int8 term holds its activations.

A few channels of the residual stream are tens of times larger than the rest, and a row's int8 scale has to reach them. The
same model in another orthonormal basis has no such channels: QuaRot (Ashkboos et al. 2024, arXiv 2404.00456, section 4,
stages 1a and 1c), with random matrices in the place of Hadamard's, as they exist for every size. What enters `down_proj` is
made by a product of elements and stays in its own basis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SEED = 7


def orthonormal(size: int) -> Tensor:
    """float32 [size, size], the same in every process: replicas of one model give the same answers."""
    normal = torch.randn(size, size, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    turn: Tensor = torch.linalg.qr(normal).Q
    return turn.float()


class Rotation:
    """Of the residual stream by one matrix and of the values of each head by another. Changes modules in place, to float32,
    with the norms' weights moved into the products that read them; the model's output stays what it was."""

    def __init__(self, hidden: int, dim: int) -> None:
        self._stream, self._value = orthonormal(hidden), orthonormal(dim)
        self._dim = dim

    def embedding(self, weight: Tensor) -> Tensor:
        """[vocab, hidden], in the number format of `weight`."""
        return (weight.float() @ self._stream).to(weight.dtype)

    def reader(self, linear: Any, norm: Any) -> None:
        """A product whose input is the normalized stream."""
        linear.weight.data = (linear.weight.detach().float() * norm.weight.detach().float()) @ self._stream

    def _writer(self, linear: Any) -> None:
        linear.weight.data = self._stream.T @ linear.weight.detach().float()

    def layer(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            self.reader(linear, layer.input_layernorm)
        for linear in (mlp.gate_proj, mlp.up_proj):
            self.reader(linear, layer.post_attention_layernorm)
        self._values(attention.v_proj, attention.o_proj)
        self._writer(attention.o_proj)
        self._writer(mlp.down_proj)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data = torch.ones_like(norm.weight)

    def _values(self, values: Any, output: Any) -> None:
        """Attention adds up values with one weight for all of a head's dimensions, so their basis is free."""
        values.weight.data = (self._value.T @ values.weight.data.unflatten(0, (-1, self._dim))).flatten(0, 1)
        if values.bias is not None:
            values.bias.data = (values.bias.detach().float().unflatten(0, (-1, self._dim)) @ self._value).flatten()
        output.weight.data = (output.weight.detach().float().unflatten(1, (-1, self._dim)) @ self._value).flatten(1)
