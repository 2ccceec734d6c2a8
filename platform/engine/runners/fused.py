"""The fast path for Llama-like models (Llama, SmolLM, Mistral, Qwen2, Qwen3) on the CPU.

A layer is four matrix products of a library and four passes of our kernels between them; transformers' modelling code runs
dozens of small operations there. Weights come from a transformers model, and so does the rotary table: the numbers are
the same, only who computes them differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gearshift.platform.engine.kernels.rows import add_norm, rotate, silu_mul
from gearshift.platform.engine.kv.cpu import CpuCache, flat
from gearshift.platform.engine.rows import Rows
from gearshift.platform.engine.runners.linear import MIN_ROWS, Int4Linear, Int8Linear, Linear, PackedLinear, Scratch
from gearshift.platform.engine.runners.rotation import Rotation

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary tables that do not depend on the length of the sequence."""
INT4_GROUP = 32
WIDE = frozenset({"down_proj"})
"""int8 products whose input is not in the rotated basis, and needs two terms."""
NOTHING: NDArray[np.float32] = np.zeros(0, np.float32)


def why_not_fused(config: Any) -> str | None:
    """The reason that this path can't run a model, or None."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type} is not one of {', '.join(sorted(FAMILIES))}"
    if rope not in STATIC_ROPE:
        return f"rope type {rope}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if dim % 32 or config.hidden_size % 32 or config.intermediate_size % 32:
        return f"sizes that are not multiples of 32 (head {dim}, hidden {config.hidden_size})"
    if getattr(config, "mlp_bias", False):
        return "biases in the MLP"
    return None


@dataclass(slots=True)
class Layer:
    input_norm: NDArray[np.float32]
    qkv: Linear
    query_norm: NDArray[np.float32]
    key_norm: NDArray[np.float32]
    output: Linear
    post_norm: NDArray[np.float32]
    gate_up: Linear
    down: Linear
    window: int


class FusedModel:
    """Rows to logits. Takes the weights out of `model`, layer by layer, so that memory never holds both copies."""

    def __init__(self, model: Any, cache: CpuCache, quantization: str | None, max_rows: int, max_len: int) -> None:
        config = model.config
        self._cache = cache
        self._quantization = quantization
        self._max_rows = max(max_rows, MIN_ROWS)
        self._scratch = Scratch(max_rows, cache.workers)
        self._hidden, self._inner = config.hidden_size, config.intermediate_size
        self._epsilon = np.float32(config.rms_norm_eps)
        self._heads = config.num_attention_heads
        self._scale = float(cache.dim**-0.5)
        self._rotation = Rotation(self._hidden, cache.dim) if quantization == "int8" else None
        self._embedding = self._take_embedding(model)
        self._cos, self._sin = rotary_tables(model, max_len)
        self._head = self._linear([model.lm_head], "lm_head")
        self._norm = numbers(model.model.norm)
        self._layers = [self._take(layer, config, index) for index, layer in enumerate(model.model.layers)]
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self._packed = np.zeros(self._max_rows * (self._heads + 2 * cache.kv_heads) * cache.dim, np.float32)

    def _take_embedding(self, model: Any) -> Tensor:
        weight: Tensor = model.model.embed_tokens.weight.detach()
        if self._rotation is None:
            return weight.clone()
        turned = self._rotation.embedding(weight)
        self._rotation.reader(model.lm_head, model.model.norm)
        model.model.norm.weight.data.fill_(1.0)
        return turned

    def _take(self, layer: Any, config: Any, index: int) -> Layer:
        if self._rotation is not None:
            self._rotation.layer(layer)
        attention, mlp = layer.self_attn, layer.mlp
        taken = Layer(
            input_norm=numbers(layer.input_layernorm),
            qkv=self._linear([attention.q_proj, attention.k_proj, attention.v_proj], "qkv_proj"),
            query_norm=numbers(getattr(attention, "q_norm", None)),
            key_norm=numbers(getattr(attention, "k_norm", None)),
            output=self._linear([attention.o_proj], "o_proj"),
            post_norm=numbers(layer.post_attention_layernorm),
            gate_up=self._linear([mlp.gate_proj, mlp.up_proj], "gate_up_proj"),
            down=self._linear([mlp.down_proj], "down_proj"),
            window=window_of(config, index),
        )
        layer.to("meta")
        return taken

    def _linear(self, modules: list[Any], name: str) -> Linear:
        weight = torch.cat([module.weight.detach() for module in modules])
        biases = [module.bias for module in modules if module.bias is not None]
        bias = torch.cat([each.detach() for each in biases]) if biases else None
        if self._quantization == "int8":
            return Int8Linear(weight, bias, self._scratch, terms=2 if name in WIDE else 1)
        if self._quantization == "int4" and name == "lm_head":
            return Int8Linear(weight, bias, self._scratch)
        if self._quantization == "int4":
            return Int4Linear(weight, None if bias is None else bias.bfloat16(), INT4_GROUP)
        return PackedLinear(weight, bias)

    def _buffer(self, width: int, dtype: torch.dtype) -> Tensor:
        """Rows that a product reads. Shared by all layers: no two of the same width and format are alive at once."""
        if (width, dtype) not in self._buffers:
            self._buffers[width, dtype] = torch.zeros(self._max_rows, width, dtype=dtype)
        return self._buffers[width, dtype]

    def logits(self, rows: Rows) -> Tensor:
        """[N, vocab] of the sampled rows."""
        count = len(rows.tokens)
        residual = self._embedding[torch.from_numpy(rows.tokens)].float()
        plan = self._cache.prepare(rows)
        update = NOTHING
        for index, layer in enumerate(self._layers):
            x = self._normalized(residual, update, layer.input_norm, layer.qkv)
            self._rotate(layer.qkv(x, count), layer, rows)
            mixed = self._buffer(self._heads * self._cache.dim, layer.output.takes)
            self._cache.attend_packed(index, self._packed, plan, self._scale, layer.window, flat(mixed))
            x = self._normalized(residual, flat(layer.output(mixed, count)), layer.post_norm, layer.gate_up)
            inner = self._buffer(self._inner, layer.down.takes)
            silu_mul(flat(layer.gate_up(x, count)), self._inner, flat(inner)[: count * self._inner])
            last = layer.down(inner, count)
            update = flat(last)
        if not len(rows.sampled):
            return torch.empty(0, 0)
        residual += last[:count]
        wanted = residual[torch.from_numpy(rows.sampled)]
        return self._head(self._normalized(wanted, NOTHING, self._norm, self._head), len(wanted))[: len(wanted)]

    def _normalized(self, residual: Tensor, update: NDArray[Any], weight: NDArray[np.float32], into: Linear) -> Tensor:
        out = self._buffer(self._hidden, into.takes)
        add_norm(flat(residual), update, weight, self._epsilon, self._hidden, flat(out))
        return out

    def _rotate(self, qkv: Tensor, layer: Layer, rows: Rows) -> None:
        rotate(
            flat(qkv), rows.positions, self._cos, self._sin, self._heads, self._cache.kv_heads, self._cache.dim,
            layer.query_norm, layer.key_norm, self._epsilon, self._packed,
        )  # fmt: skip


def numbers(norm: Any) -> NDArray[np.float32]:
    """The weight of a norm, or nothing."""
    if norm is None:
        return NOTHING
    weight: NDArray[np.float32] = norm.weight.detach().float().numpy().copy()
    return weight


def window_of(config: Any, layer: int) -> int:
    """Tokens that a layer sees, 0 for all: models mix both kinds."""
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[layer] != "sliding_attention":
        return 0
    if not getattr(config, "use_sliding_window", True):
        return 0
    return int(getattr(config, "sliding_window", None) or 0)


def rotary_tables(model: Any, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, [length, dim] flat, as the model's own module makes them."""
    with torch.inference_mode():
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), torch.arange(length).unsqueeze(0))
    return cos[0].float().numpy().reshape(-1).copy(), sin[0].float().numpy().reshape(-1).copy()
