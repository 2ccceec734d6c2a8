"""From a step to its tokens. Loads a model, picks who computes it, and samples from what comes out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gearshift.platform.config import Model
from gearshift.platform.engine.kernels.simd import LANES
from gearshift.platform.engine.kv.cache import DTYPES, kv_bytes_per_token, make_cache
from gearshift.platform.engine.parallel import Leading, Place, follow, join, share_of
from gearshift.platform.engine.rows import Rows, rows_of
from gearshift.platform.engine.runners.fused import INT4_GROUP, FusedModel, why_not_fused
from gearshift.platform.engine.runners.linear import Int4Linear, Int8Linear, Linear, Scratch
from gearshift.platform.engine.runners.transformers import (
    ATTENTION,
    QuantizedLinear,
    TransformersModel,
    paged_attention,
)
from gearshift.platform.engine.sampling import sample
from gearshift.platform.engine.sequence import Chunk, Sampled, Scores, Sequence, Step
from gearshift.platform.engine.workers import Workers
from gearshift.platform.errors import ConfigError
from gearshift.platform.request import SamplingParams

SCORED_AT_ONCE = 64
"""Rows of the vocabulary's width in float32 at a time."""


class Logits(Protocol):
    def logits(self, rows: Rows) -> Tensor:
        """[N, vocab] of the sampled rows. Stores the keys and values of all rows."""
        ...


class TorchRunner:
    """Runs one model on one device."""

    def __init__(self, model: Logits, block_size: int) -> None:
        self._model = model
        self._block_size = block_size

    @torch.inference_mode()
    def run(self, step: Step) -> list[Sampled]:
        logits = self._model.logits(rows_of(step, self._block_size))
        logits = self._without_scored(step, logits)
        sequences = [chunk.sequence for chunk in step if chunk.samples]
        if not sequences:
            return []
        greedy = logits.argmax(dim=-1).tolist()
        return [
            _sampled(_chosen(each, token, row), row, each.sampling)
            for each, token, row in zip(sequences, greedy, logits, strict=True)
        ]

    def _without_scored(self, step: Step, logits: Tensor) -> Tensor:
        """Takes the scores of prompt tokens out of the logits; returns the rows that are left, one for each that samples."""
        if not any(len(chunk.scored) for chunk in step):
            return logits
        at, left = 0, []
        for chunk in step:
            for start in range(chunk.scored.start, chunk.scored.stop, SCORED_AT_ONCE):
                places = range(start, min(chunk.scored.stop, start + SCORED_AT_ONCE))
                ids = chunk.sequence.tokens(places.start, places.stop)
                told = scores(logits[at : at + len(places)], ids, chunk.sequence.sampling.logprobs or 0)
                chunk.sequence.prompt_scores.update(zip(places, told, strict=True))
                at += len(places)
            if chunk.samples:
                left.append(at)
                at += 1
        return logits[left]

    def close(self) -> None:
        if isinstance(self._model, Leading):
            self._model.close()

    def warm_up(self) -> None:
        """Compiles kernels and touches the weights, so that the first request does not wait for it."""
        sequence = Sequence("warm-up", [0] * 4, SamplingParams(), 1, blocks=[0])
        for start, end in ((0, 3), (3, 4)):
            self.run((Chunk(sequence, start, end),))

    def prompt_s(self, blocks: list[int]) -> float:
        """Seconds that one token of a prompt takes which fills these blocks; overwrites them."""
        count = len(blocks) * self._block_size
        sequence = Sequence("speed", [0] * count, SamplingParams(), 1, blocks=blocks)
        begun = time.perf_counter()
        self.run((Chunk(sequence, 0, count),))
        return (time.perf_counter() - begun) / count

    @torch.inference_mode()
    def losses(self, tokens: list[int], blocks: list[int], chunk: int) -> list[float]:
        """-log p of each token but the first, in nats, computed as a prompt in chunks. For perplexities."""
        sequence = Sequence("losses", tokens, SamplingParams(), 1, blocks=blocks)
        losses: list[float] = []
        for start in range(0, len(tokens) - 1, chunk):
            end = min(len(tokens) - 1, start + chunk)
            rows = rows_of((Chunk(sequence, start, end),), self._block_size)
            logits = self._model.logits(rows._replace(sampled=rows.positions - start)).float()
            target = torch.tensor(tokens[start + 1 : end + 1], device=logits.device)
            losses += nn.functional.cross_entropy(logits, target, reduction="none").tolist()
        return losses


def _chosen(sequence: Sequence, best: int, logits: Tensor) -> int:
    """best: the likeliest token, by logits [vocab]."""

    def draw(logits: Tensor, turn: int = 0) -> int:
        seed = sequence.seed + (turn << 64)  # a number of its own for each turn: the first one led to what was refused
        return sample(logits, sequence.sampling, sequence.prompt_ids, sequence.output_ids, seed)

    token = best if takes_best(sequence.sampling) else draw(logits)
    banned, output, turn = sequence.banned, sequence.output_ids, 0
    if banned is None or not banned.refuses(output, token):
        return token
    left = logits.clone()
    while banned.refuses(output, token):  # drawing anew among the others is drawing from what they share
        left[token], turn = -torch.inf, turn + 1
        token = draw(left, turn)
    return token


def _sampled(token: int, logits: Tensor, params: SamplingParams) -> Sampled:
    if not params.certainty and params.logprobs is None:
        return Sampled(token)
    told = scores(logits.unsqueeze(0), [token], params.logprobs or 0)[0]
    entropy = 0.0
    if params.certainty:
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        entropy = float(-(logprobs.exp() * logprobs).sum())
    return Sampled(token, told.logprob, entropy, told.top)


def scores(logits: Tensor, ids: list[int], most: int) -> list[Scores]:
    """Of each id, and of the `most` likeliest ones beside it. logits: [N, vocab], a row for each id."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    if not most:
        return [Scores(value) for value in own]
    values, places = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
    found = []
    for token, value, row, at in zip(ids, own, values.tolist(), places.tolist(), strict=True):
        top = tuple(zip(at, row, strict=True))
        found.append(Scores(value, top if token in at else (*top, (token, value))))
    return found


def takes_best(params: SamplingParams) -> bool:
    penalized = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    return params.temperature == 0 and not penalized and params.watermark is None


class Loaded:
    """A model with its cache, ready to run. `num_blocks` is what `kv_cache_memory` holds, unless given. With a `place`, one
    rank's share of it: rank 0 has the runner, and `follow` is what the others do."""

    def __init__(self, path: Path, settings: Model, num_blocks: int | None = None, place: Place | None = None) -> None:
        config = read_config(path)
        self._place = place
        longest = config.max_position_embeddings
        self.max_model_len = min(settings.max_model_len or longest, longest)
        self.device = torch.device(pick_device(settings.device))
        check_quantization(config, settings)
        if place is not None:
            config = share_of(config, place.size)
            join(place, self.device)
        self.kv_dtype = DTYPES[settings.dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype]
        self.block_bytes = kv_bytes_per_token(config, self.kv_dtype) * settings.block_size
        self.num_blocks = num_blocks or int(settings.kv_cache_memory) // self.block_bytes
        if self.num_blocks < 1:
            raise ConfigError(f"kv_cache_memory: holds no block; one takes {self.block_bytes} bytes")
        self.why_not_fused = why_not(config, settings, self.device)
        if settings.model_impl == "fused" and self.why_not_fused:
            raise ConfigError(f"model_impl: fused does not serve this model: {self.why_not_fused}; use auto")
        model = load_model(path, settings, self.device, place)
        self.generation_config = model.generation_config
        self._model = self._prepared(model, config, settings)
        if place is None or place.rank == 0:
            computes = self._model if place is None else Leading(self._model)
            self.runner = TorchRunner(computes, settings.block_size)
            self.runner.warm_up()

    def follow(self) -> None:
        """Computes with rank 0 until it lets this rank go. Raises when it is gone."""
        follow(self._model)

    def _prepared(self, model: Any, config: Any, settings: Model) -> Logits:
        threads, rows = torch.get_num_threads(), settings.max_num_batched_tokens
        cache = make_cache(config, self.num_blocks, settings.block_size, self.kv_dtype, self.device, threads)
        self.cache = cache
        if self.why_not_fused is None:
            return FusedModel(model, cache, settings.quantization, rows, self.max_model_len)  # type: ignore[arg-type]
        if settings.quantization and self.device.type == "cpu":
            quantize_modules(model, settings.quantization, rows)
        return TransformersModel(model, cache)


def read_config(path: Path) -> Any:
    """Raises `ConfigError` for attention that no path here computes."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(path)
    if getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(f"source: {config.model_type} caps attention logits, which the paged attention does not do")
    return config


def check_quantization(config: Any, settings: Model) -> None:
    stored = getattr(config, "quantization_config", None)
    if settings.quantization and stored:
        method = stored.get("quant_method", "unknown") if isinstance(stored, dict) else stored.quant_method
        raise ConfigError(
            f"quantization: {settings.quantization} can't be applied to source: its weights are quantized already ({method}); "
            "remove quantization"
        )


def why_not(config: Any, settings: Model, device: torch.device) -> str | None:
    """The reason that the fused path can't be taken, or None."""
    if settings.model_impl == "transformers":
        return "model_impl: transformers"
    if settings.tensor_parallel > 1:
        return "tensor_parallel"
    if device.type != "cpu":
        return f"device {device.type}"
    if "float16" in (settings.dtype, settings.kv_cache_dtype):
        return "float16"
    if not torch.backends.mkldnn.is_available():
        return "no oneDNN in this torch"
    if settings.dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "no bfloat16 products on this processor"
    if getattr(config, "quantization_config", None):
        return "weights quantized in the checkpoint"
    return why_not_fused(config)


def load_model(path: Path, settings: Model, device: torch.device, place: Place | None = None) -> Any:
    """A transformers model that computes attention over the paged cache; each rank reads only its share."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    AttentionInterface.register(ATTENTION, paged_attention)
    extra: dict[str, Any] = {"device_map": {"": device}}
    if place is not None:
        from transformers.distributed import DistributedConfig

        extra = {"distributed_config": DistributedConfig(tp_size=place.size)}
    if settings.quantization and device.type != "cpu":
        extra["quantization_config"] = torchao_config(settings.quantization)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, settings.dtype), attn_implementation=ATTENTION, **extra
    )
    return model.eval()


def torchao_config(quantization: str) -> Any:
    """Quantization while loading on a GPU, by the library that has its kernels."""
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError as error:
        raise ConfigError(f"quantization: {quantization} with device: cuda needs the package torchao") from error
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig() if quantization == "int8" else Int4WeightOnlyConfig())


def quantize_modules(model: Any, quantization: str, max_rows: int) -> None:
    """Puts a weight format of the CPU in the place of every `nn.Linear`, one after the other."""
    scratch = Scratch(max_rows, Workers(torch.get_num_threads()))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, QuantizedLinear(_quantized(module, leaf, quantization, scratch)))


def _quantized(module: nn.Linear, leaf: str, quantization: str, scratch: Scratch) -> Linear:
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    if weight.shape[1] % LANES:
        raise ConfigError(
            f"quantization: {quantization} needs inputs of a multiple of {LANES}, but {leaf} of this source has "
            f"{weight.shape[1]}; remove quantization"
        )
    if quantization == "int4" and leaf != "lm_head" and weight.shape[1] % INT4_GROUP == 0:
        return Int4Linear(weight, None if bias is None else bias.bfloat16(), INT4_GROUP)
    return Int8Linear(weight, bias, scratch)


def pick_device(device: str) -> str:
    """`auto` takes the accelerator when there is one."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
