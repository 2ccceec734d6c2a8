"""From logits to the next token. Every filter is a pure function of a 1-D tensor, so that it can be read and tested alone.

Order, as vLLM and transformers have it: penalties, watermark, temperature, top-k, top-p, min-p, draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gearshift.platform.engine.watermark import marked
from gearshift.platform.request import SamplingParams


def penalize(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Repetition penalty over prompt and output (Keskar et al. 2019, arXiv 1909.05858, section 4.1); presence and
    frequency penalty over the output, as OpenAI defines them. logits: [vocab]; returns a new tensor."""
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}), dtype=torch.long, device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(output, dtype=torch.long, device=logits.device).unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)
    return logits


def keep_top_k(probabilities: Tensor, k: int) -> Tensor:
    """The k most likely tokens, renormalised. [vocab] -> [vocab]."""
    if k <= 0 or k >= probabilities.numel():
        return probabilities
    values, ids = probabilities.topk(k)
    return torch.zeros_like(probabilities).scatter_(0, ids, values / values.sum())


def keep_top_p(probabilities: Tensor, p: float) -> Tensor:
    """The smallest set of most likely tokens whose mass reaches p, renormalised (nucleus sampling, Holtzman et al. 2020,
    arXiv 1904.09751, section 3.1). [vocab] -> [vocab]."""
    if p >= 1.0:
        return probabilities
    values, ids = probabilities.sort(descending=True, stable=True)
    mass_before = values.cumsum(0) - values
    values = torch.where(mass_before < p, values, torch.zeros_like(values))
    values[0] = torch.clamp(values[0], min=torch.finfo(values.dtype).tiny)  # p = 0 still keeps the best
    return torch.zeros_like(probabilities).scatter_(0, ids, values / values.sum())


def keep_min_p(probabilities: Tensor, p: float) -> Tensor:
    """Tokens at least p times as likely as the best, renormalised (Nguyen et al. 2024, arXiv 2407.01082, section 3)."""
    if p <= 0.0:
        return probabilities
    kept = torch.where(probabilities >= p * probabilities.max(), probabilities, torch.zeros_like(probabilities))
    return kept / kept.sum()


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The probabilities that the token is drawn from. [vocab] -> [vocab], float32."""
    probabilities = torch.softmax(logits.float() / params.temperature, dim=-1)
    probabilities = keep_top_k(probabilities, params.top_k)
    probabilities = keep_top_p(probabilities, params.top_p)
    return keep_min_p(probabilities, params.min_p)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the request's seed and the token's place in the answer."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def draw(probabilities: Tensor, u: float) -> int:
    """Inverse transform sampling: the first token at which the cumulative probability exceeds u."""
    cumulative = probabilities.double().cumsum(0)
    index = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    if index >= probabilities.numel() or probabilities[index] == 0:  # u fell on the rounding at the end
        index = int(probabilities.argmax())
    return index


def sample(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], seed: int) -> int:
    """The next token of one request. `seed` is the request's, or one drawn for it when it gave none. logits: [vocab]."""
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        logits = penalize(logits, params, prompt, output)
    if params.watermark is not None:
        logits = marked(logits, params.watermark, output[-1] if output else prompt[-1])
    if params.temperature == 0:
        return int(logits.argmax())
    return draw(distribution(logits, params), uniform(seed, len(output)))
