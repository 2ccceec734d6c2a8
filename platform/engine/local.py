"""Builds the engine of a model whose weights are on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from gearshift.platform.config import Model
from gearshift.platform.engine.blocks import BlockPool
from gearshift.platform.engine.bridge import AsyncEngine, Prompts
from gearshift.platform.engine.core import EngineCore
from gearshift.platform.engine.prefixes import BlockStore, Prefixes
from gearshift.platform.engine.scheduler import Scheduler
from gearshift.platform.errors import InvalidRequest
from gearshift.platform.request import Message, Request

if TYPE_CHECKING:
    from gearshift.platform.engine.parallel import Place
    from gearshift.platform.engine.runner import Loaded


def chat_encoder(tokenizer: Any) -> Callable[[tuple[Message, ...]], list[int]]:
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


def request_encoder(tokenizer: Any) -> Callable[[Request], list[int]]:
    """A request's messages through the chat template, or its prompt as it is."""
    from_messages = chat_encoder(tokenizer)

    def encode(request: Request) -> list[int]:
        return prompt_ids(tokenizer, request.prompt) if request.prompt is not None else from_messages(request.messages)

    return encode


def prompt_ids(tokenizer: Any, prompt: str | tuple[int, ...]) -> list[int]:
    """Raises `InvalidRequest` for ids that the model does not have, and for a prompt of no tokens."""
    ids: list[int] = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise InvalidRequest("The prompt has no token; write something to be continued.", "prompt")
    unknown = next((token for token in ids if token >= len(tokenizer)), None)
    if unknown is not None:
        raise InvalidRequest(f"The model has no token {unknown}; its ids are below {len(tokenizer)}.", "prompt")
    return ids


def eos_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: of the generation config, which knows best, and of the tokenizer."""
    declared = generation_config.eos_token_id
    listed = declared if isinstance(declared, list) else [declared]
    return frozenset(token for token in [*listed, tokenizer.eos_token_id] if token is not None)


def load_engine(
    path: Path, settings: Model, place: Place | None = None, store: Callable[[int], BlockStore] | None = None
) -> AsyncEngine:
    """Reads the weights (seconds; blocks); with a `place`, as rank 0 of several. store: makes one for blocks of so many bytes.
    Raises `ConfigError` for settings the model or the memory can't meet."""
    import torch
    from transformers import AutoTokenizer

    from gearshift.platform.engine.runner import Loaded

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return assemble(Loaded(path, settings, place=place), AutoTokenizer.from_pretrained(path), settings, store)


def follow_rank(path: Path, settings: Model, place: Place) -> None:
    """The life of a rank that is not the first: reads its share, then computes until it is let go."""
    import torch

    from gearshift.platform.engine.runner import Loaded

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    Loaded(path, settings, place=place).follow()


def assemble(
    loaded: Loaded, tokenizer: Any, settings: Model, store: Callable[[int], BlockStore] | None = None
) -> AsyncEngine:
    """A new engine, with empty queues and an empty cache, over a loaded model."""
    core = EngineCore(make_scheduler(settings, loaded.num_blocks), loaded.runner)
    prompts = Prompts(request_encoder(tokenizer), eos_ids(loaded.generation_config, tokenizer), tokenizer)
    prefixes = None
    if store is not None and settings.prompt_cache is not None:
        probe = list(range(min(loaded.num_blocks, settings.max_num_batched_tokens // settings.block_size)))
        compute_s = min(loaded.runner.prompt_s(probe) for _ in range(2))
        blocks, least = store(loaded.block_bytes), settings.prompt_cache.min_tokens
        prefixes = Prefixes(blocks, core.scheduler.pool, loaded.cache, least, compute_s)
    return AsyncEngine(core, prompts, loaded.max_model_len, settings.max_queued_requests, prefixes)


def make_scheduler(settings: Model, num_blocks: int) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, settings.block_size, settings.enable_prefix_caching),
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.target_itl_ms / 1000 if settings.target_itl_ms else None,
        settings.max_batch_wait_s,
    )
