"""The runner owns every tensor: weights, the paged KV cache, logits. It computes a step and samples its tokens.

It serves any transformers causal LM whose attention goes through the attention interface. All tokens of a step are
one row of shape [1, T], so nothing is padded; attention alone looks at who belongs to whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gearshift.platform.engine.sampling import sample
from gearshift.platform.engine.sequence import Step
from gearshift.platform.errors import ConfigError

ATTENTION = "gearshift_paged"


@dataclass(slots=True)
class Prefill:
    """Rows [first, first + n) of the step are n new tokens of one sequence, whose history is in `slots` [L]."""

    rows: slice
    slots: Tensor
    mask: Tensor | None  # [n, L], None when the whole history is new and the mask is plainly causal


@dataclass(slots=True)
class Decodes:
    """Single new tokens of B sequences. rows: [B]; slots: [B, L], padded; mask: [B, 1, 1, L], False on padding."""

    rows: Tensor
    slots: Tensor
    mask: Tensor


class PagedCache:
    """Keys and values of all layers; token i of a sequence is at slot `block * block_size + i % block_size`."""

    def __init__(self, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        heads, dim = kv_shape(config)
        shape = (num_blocks * block_size, heads, dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]

    def slots(self, blocks: list[int], tokens: int) -> Tensor:
        """Slots of the first `tokens` tokens of a sequence that owns `blocks`. [tokens], on the CPU."""
        first = torch.tensor(blocks, dtype=torch.long).unsqueeze(1) * self.block_size
        return (first + torch.arange(self.block_size)).flatten()[:tokens]


def kv_shape(config: Any) -> tuple[int, int]:
    """(KV heads, head dimension) of a transformers config."""
    heads = config.num_attention_heads
    return (
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    heads, dim = kv_shape(config)
    return 2 * int(config.num_hidden_layers) * heads * dim * dtype.itemsize


@dataclass(slots=True)
class StepLayout:
    """Where the rows of a step come from and go to; made once a step, read by every layer."""

    cache: PagedCache
    write: Tensor  # [T] slots that the new keys and values go to
    prefills: list[Prefill]
    decodes: Decodes | None


def paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface. query: [1, H, T, D]; key, value: [1, KH, T, D]; returns [1, T, H, D]."""
    layout: StepLayout = kwargs["layout"]
    keys, values = layout.cache.keys[module.layer_idx], layout.cache.values[module.layer_idx]
    keys.index_copy_(0, layout.write, key[0].transpose(0, 1))
    values.index_copy_(0, layout.write, value[0].transpose(0, 1))
    out = torch.empty_like(query)
    for prefill in layout.prefills:
        out[:, :, prefill.rows] = _attend_prefill(query[:, :, prefill.rows], keys, values, prefill, scaling)
    if layout.decodes is not None:
        out[0, :, layout.decodes.rows] = _attend_decodes(query[0], keys, values, layout.decodes, scaling)
    return out.transpose(1, 2), None


def _attend_prefill(query: Tensor, keys: Tensor, values: Tensor, prefill: Prefill, scaling: float) -> Tensor:
    """query: [1, H, n, D] -> [1, H, n, D]."""
    groups = query.shape[1] // keys.shape[1]
    k = keys[prefill.slots].transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0)
    v = values[prefill.slots].transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0)
    return F.scaled_dot_product_attention(
        query, k, v, attn_mask=prefill.mask, is_causal=prefill.mask is None, scale=scaling
    )


def _attend_decodes(query: Tensor, keys: Tensor, values: Tensor, decodes: Decodes, scaling: float) -> Tensor:
    """query: [H, T, D] -> [H, B, D]. The query heads that share a KV head are its query positions: no copy of K and V."""
    heads, _, dim = query.shape
    batch, kv_heads = decodes.rows.numel(), keys.shape[1]
    q = query[:, decodes.rows].transpose(0, 1).reshape(batch, kv_heads, heads // kv_heads, dim)
    k, v = keys[decodes.slots].transpose(1, 2), values[decodes.slots].transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=decodes.mask, scale=scaling)
    return out.reshape(batch, heads, dim).transpose(0, 1)


class TorchRunner:
    """Runs one model on one device."""

    def __init__(self, model: Any, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.cache = PagedCache(model.config, num_blocks, block_size, model.dtype, self.device)

    @torch.inference_mode()
    def run(self, step: Step) -> list[int]:
        ids = [token for chunk in step for token in chunk.sequence.tokens(chunk.start, chunk.end)]
        positions = [position for chunk in step for position in range(chunk.start, chunk.end)]
        ends = torch.tensor([chunk.end - chunk.start for chunk in step]).cumsum(0) - 1
        last_rows = [int(end) for end, chunk in zip(ends, step, strict=True) if chunk.samples]
        logits = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(last_rows or [0], device=self.device),
            layout=self._layout(step),
        ).logits[0]
        return self._sample(step, logits) if last_rows else []

    def _layout(self, step: Step) -> StepLayout:
        write: list[Tensor] = []
        prefills: list[Prefill] = []
        single: list[tuple[int, Tensor]] = []
        row = 0
        for sequence, start, end in step:
            slots = self.cache.slots(sequence.blocks, end)
            write.append(slots[start:])
            if end - start == 1:
                single.append((row, slots))
            else:
                prefills.append(Prefill(slice(row, row + end - start), slots.to(self.device), self._mask(start, end)))
            row += end - start
        return StepLayout(self.cache, torch.cat(write).to(self.device), prefills, self._decodes(single))

    def _mask(self, start: int, end: int) -> Tensor | None:
        """Causal mask of new positions [start, end) over [0, end)."""
        if start == 0:
            return None
        return torch.ones(end - start, end, dtype=torch.bool, device=self.device).tril(diagonal=start)

    def _decodes(self, single: list[tuple[int, Tensor]]) -> Decodes | None:
        if not single:
            return None
        slots = torch.nn.utils.rnn.pad_sequence([slots for _, slots in single], batch_first=True)
        lengths = torch.tensor([slots.numel() for _, slots in single])
        mask = torch.arange(slots.shape[1]) < lengths.unsqueeze(1)
        rows = torch.tensor([row for row, _ in single])
        return Decodes(rows.to(self.device), slots.to(self.device), mask[:, None, None, :].to(self.device))

    def _sample(self, step: Step, logits: Tensor) -> list[int]:
        """logits: [S, vocab], one row for each chunk that samples."""
        greedy = logits.argmax(dim=-1).tolist()
        ids: list[int] = []
        for row, sequence in enumerate(chunk.sequence for chunk in step if chunk.samples):
            params = sequence.sampling
            plain = params.temperature == 0 and params.repetition_penalty == 1.0
            if plain and not (params.presence_penalty or params.frequency_penalty):
                ids.append(greedy[row])
            else:
                ids.append(sample(logits[row], params, sequence.prompt_ids, sequence.output_ids, sequence.seed))
        return ids


def load_model(path: Path, dtype: str, device: str, max_model_len: int) -> Any:
    """A transformers model that computes attention over the paged cache. Raises `ConfigError` for what it can't serve."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(path)
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < max_model_len:
        raise ConfigError(f"max_model_len: {max_model_len} exceeds the model's sliding window; set at most {window}")
    if getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(f"source: {config.model_type} caps attention logits, which the paged attention does not do")
    AttentionInterface.register(ATTENTION, paged_attention)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation=ATTENTION, device_map={"": pick_device(device)}
    )
    return model.eval()


def pick_device(device: str) -> str:
    """`auto` takes the accelerator when there is one."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
