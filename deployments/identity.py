"""What makes an answer the same answer. Whatever could change one is in here by default; what is left out is listed, with the
reason, and a test walks all fields."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from gearshift import __version__
from gearshift.platform.cache.exact import Question
from gearshift.platform.config import Config, Model
from gearshift.platform.openai import Generation
from gearshift.platform.request import Message, SamplingParams

HARMLESS_MODEL = {
    "source": "the revision of the weights stands for it",
    "upstream": "its address and model do",
    "echo": "answers with the question, however slowly",
    "num_gpus": "where it runs",
    "placement": "where it runs",
    "resources": "where it runs",
    "max_replicas_per_node": "where it runs",
    "replicas": "how many",
    "autoscaling": "how many",
    "warm_up": "asked of it, before anybody else does",
    "kv_cache_memory": "how much fits, not what is computed",
    "max_num_seqs": "when it is computed, not what",
    "max_num_batched_tokens": "when it is computed, not what",
    "target_itl_ms": "when it is computed, not what",
    "max_batch_wait_s": "when it is computed, not what",
    "max_queued_requests": "who is refused",
    "prompt_cache": "what is computed once",
    "enable_prefix_caching": "what is computed once",
    "pipeline_parallel": "is always 1",
}
"""Settings of a model that change no answer."""
HARMLESS_REQUEST = {
    "model": "the release that it led to stands for it",
    "stream": "how the answer is sent",
    "stream_options": "how the answer is sent",
    "user": "who asks; experiments choose the release by it, and the release is in",
    "safety_identifier": "who asks, likewise",
    "prompt_cache_key": "who asks, likewise; and at which replica",
    "service_tier": "when it is computed",
    "priority": "when it is computed",
    "cache": "whether the cache is asked at all",
    "n": "several answers are never cached",
    "moderation": "answers with verdicts are never cached",
    "logprobs": "answers with probabilities are never cached",
    "top_logprobs": "answers with probabilities are never cached",
    "echo": "answers with their prompt are never cached",
}
"""Fields of requests that change no answer, or whose answers are never cached."""


BLOCKS = {"dtype", "quantization", "kv_cache_dtype", "model_impl", "device", "block_size", "tensor_parallel"}
"""Settings of a model that change what is in its KV blocks."""


def fingerprint(config: Config, release: str, revisions: Mapping[str, str]) -> str:
    """Changes whenever the release could answer differently. revisions: of each model's weights, or where it is upstream."""
    pinned = config.releases[release]
    model = config.models[pinned.model]
    parts: list[Any] = [
        release,
        pinned.model,
        revisions[pinned.model],
        sorted(model.model_dump(mode="json", exclude=set(HARMLESS_MODEL)).items()),
        config.prompts[pinned.prompt].model_dump(),
        config.policies[pinned.policy].model_dump(),
        pinned.watermark.model_dump() if pinned.watermark is not None else None,
    ]
    return "fp_" + hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def block_version(model: Model, revision: str) -> str:
    """Of all that the numbers in a KV block depend on. revision: of the weights."""
    shape = model.model_dump(mode="json", include=BLOCKS)
    return hashlib.sha256(msgspec.json.encode([revision, __version__, sorted(shape.items())])).hexdigest()[:16]


def question(
    tenant: str,
    name: str,
    release: str,
    body: Generation,
    messages: tuple[Message, ...],
    sampling: SamplingParams,
    judge: str,
    generation: int,
) -> Question:
    """name, release: of the release, its name and its fingerprint. messages, sampling: what the engine would get, after redaction
    and with defaults. judge: of the cascade that an answer has to pass, since one that nobody judged is none. generation: a
    version that was rolled back leaves its answers behind."""
    return Question(
        tenant, name, release, messages, sampling, body.cache_salt or "", body.raw, body.token_ids, judge, generation
    )
