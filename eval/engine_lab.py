"""The engines that `gearshift bench engine` measures: one model in several number formats, and the floor under them."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from gearshift.eval.drive import InProcess
from gearshift.eval.workload import Count, chat_count
from gearshift.platform.config import Model
from gearshift.platform.engine.local import assemble, chat_encoder
from gearshift.platform.engine.runner import Loaded

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "quantization": None},
    "bfloat16": {"dtype": "bfloat16", "quantization": None},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 KV": {"dtype": "bfloat16", "quantization": None, "kv_cache_dtype": "int8"},
}
TEXT_TOKENS, TEXT_WINDOW, CHUNK = 4096, 1024, 256


class Lab:
    """Loads each format once; every measurement gets a fresh engine over it, with an empty cache and empty queues."""

    def __init__(self, path: Path, settings: Model) -> None:
        from transformers import AutoConfig, AutoTokenizer

        self.path = path
        self.settings = settings
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.config: Any = AutoConfig.from_pretrained(path)
        self.count: Count = chat_count(chat_encoder(self.tokenizer))
        self._loaded: dict[str, Loaded] = {}
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)

    def _settings(self, form: str, **changes: Any) -> Model:
        return self.settings.model_copy(update={**FORMATS[form], **changes})

    def loaded(self, form: str) -> Loaded:
        if form not in self._loaded:
            self._loaded[form] = Loaded(self.path, self._settings(form))
        return self._loaded[form]

    @asynccontextmanager
    async def engine(self, form: str, **changes: Any) -> AsyncIterator[InProcess]:
        """`changes`: scheduler settings. The model and its KV memory stay as they were loaded."""
        engine = assemble(self.loaded(form), self.tokenizer, self._settings(form, **changes))
        try:
            yield InProcess(engine)
        finally:
            await engine.close()

    def perplexity(self, form: str) -> float:
        """Of a fixed English text that every Python has (the language reference), in windows of 1,024 tokens."""
        text = "\n".join(topics[name] for name in ("objects", "execmodel", "compound", "specialnames"))
        ids: list[int] = self.tokenizer(text)["input_ids"][:TEXT_TOKENS]
        loaded = self.loaded(form)
        blocks = list(range(-(-TEXT_WINDOW // self.settings.block_size)))
        losses: list[float] = []
        for start in range(0, len(ids) - 1, TEXT_WINDOW):
            losses += loaded.runner.losses(ids[start : start + TEXT_WINDOW], blocks, CHUNK)
        return math.exp(sum(losses) / len(losses))


class Floor:
    """The model's bare matrix products through `torch.nn.functional.linear`, one after the other, and nothing else."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
        shapes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
        shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
        layers = [shape for _ in range(config.num_hidden_layers) for shape in shapes]
        self._weights = [torch.randn(shape).to(dtype) for shape in [*layers, (config.vocab_size, hidden)]]
        self._dtype = dtype

    @torch.inference_mode()
    def tokens_per_cpu_second(self, rows: int, rounds: int = 5) -> float:
        inputs = {width: torch.randn(rows, width).to(self._dtype) for width in {w.shape[1] for w in self._weights}}
        begun = 0.0
        for turn in range(rounds + 1):
            if turn == 1:
                begun = time.process_time()  # the first round warms up
            for weight in self._weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        return rows * rounds / (time.process_time() - begun)
