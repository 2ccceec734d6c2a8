"""Builds the engine of a model whose weights are on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from gearshift.platform.config import Model
from gearshift.platform.engine.blocks import BlockPool
from gearshift.platform.engine.bridge import AsyncEngine, Prompts
from gearshift.platform.engine.core import EngineCore
from gearshift.platform.engine.scheduler import Scheduler
from gearshift.platform.errors import ConfigError, InvalidRequest
from gearshift.platform.request import Message


def chat_encoder(tokenizer: Any) -> Any:
    """Messages to ids through the model's own chat template, ready for the assistant's turn."""

    def encode(messages: tuple[Message, ...]) -> list[int]:
        turns = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.content}
            for message in messages
        ]
        try:
            ids: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            raise InvalidRequest(f"The model's chat template refuses these messages: {error}.", "messages") from error
        return ids

    return encode


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: of the generation config, which knows best, and of the tokenizer."""
    declared = model.generation_config.eos_token_id
    listed = declared if isinstance(declared, list) else [declared]
    return frozenset(token for token in [*listed, tokenizer.eos_token_id] if token is not None)


def load_engine(path: Path, settings: Model) -> AsyncEngine:
    """Reads the weights (seconds; blocks). Raises `ConfigError` for settings the model or the memory can't meet."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from gearshift.platform.engine.runner import TorchRunner, kv_bytes_per_token, load_model

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    longest = AutoConfig.from_pretrained(path).max_position_embeddings
    max_model_len = min(settings.max_model_len or longest, longest)
    model = load_model(path, settings.dtype, settings.device, max_model_len)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    block_bytes = kv_bytes_per_token(model.config, model.dtype) * settings.block_size
    num_blocks = int(settings.kv_cache_memory) // block_bytes
    if num_blocks < 1:
        raise ConfigError(f"kv_cache_memory: holds no block; one takes {block_bytes} bytes")
    scheduler = Scheduler(
        BlockPool(num_blocks, settings.block_size), settings.max_num_seqs, settings.max_num_batched_tokens
    )
    core = EngineCore(scheduler, TorchRunner(model, num_blocks, settings.block_size), tokenizer)
    prompts = Prompts(chat_encoder(tokenizer), eos_ids(model, tokenizer))
    return AsyncEngine(core, prompts, max_model_len, settings.max_queued_requests)
