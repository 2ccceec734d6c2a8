"""What the memory of keys and values has to do, and which kind fits a model, a device and a number format."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gearshift.platform.engine.rows import Rows
from gearshift.platform.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
LANES = 16
Array = NDArray[Any]


class KVCache(Protocol):
    """Keys and values of every layer, in blocks; owns their layout and the attention over it."""

    def prepare(self, rows: Rows) -> Any:
        """What all layers of a step share; handed back to `attend`."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: Any, scale: float, window: int
    ) -> Tensor:
        """Stores the new keys and values, then attends over all. query: [T, H, D]; key, value: [T, KH, D]; returns
        [T, H, D]. `window` 0 sees everything before, else the last `window` tokens."""
        ...

    def export(self, block: int) -> bytes:
        """All layers' keys and values of a block, in the format of this cache."""
        ...

    def restore(self, block: int, content: bytes) -> None:
        """Puts what `export` of an equal cache gave into a block. Raises `ValueError` for another length."""
        ...


def join(parts: list[Array]) -> bytes:
    """Bytes of arrays that lie together."""
    return b"".join(part.tobytes() for part in parts)


def split(content: bytes, parts: list[Array]) -> None:
    """Fills the arrays with what `join` gave. Raises `ValueError`."""
    if len(content) != sum(part.nbytes for part in parts):
        raise ValueError(f"a block of {len(content)} bytes is none of {sum(part.nbytes for part in parts)}")
    at = 0
    for part in parts:
        part[:] = np.frombuffer(content, part.dtype, part.size, at)
        at += part.nbytes


def kv_shape(config: Any) -> tuple[int, int]:
    """(KV heads, head dimension) of a transformers config."""
    heads = config.num_attention_heads
    return (
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """int8 counts the float32 scale of each head as well."""
    heads, dim = kv_shape(config)
    scale = torch.float32.itemsize if dtype == torch.int8 else 0
    return 2 * int(config.num_hidden_layers) * heads * (dim * dtype.itemsize + scale)


def make_cache(
    config: Any, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, threads: int
) -> KVCache:
    """On a CPU the kernels of `cpu.py`; on a GPU torch's fused paged attention; plain torch for what neither takes."""
    _, dim = kv_shape(config)
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16, torch.int8) and dim % LANES == 0:
        from gearshift.platform.engine.kv.cpu import CpuCache

        return CpuCache(config, num_blocks, block_size, dtype, threads)
    if dtype == torch.int8:
        raise ConfigError(f"kv_cache_dtype: int8 needs device: cpu and a head dimension that is a multiple of {LANES}")
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        from gearshift.platform.engine.kv.varlen import VarlenCache

        return VarlenCache(config, num_blocks, block_size, dtype, device)
    from gearshift.platform.engine.kv.slots import SlotCache

    return SlotCache(config, num_blocks, block_size, dtype, device)
