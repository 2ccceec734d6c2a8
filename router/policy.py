"""From a score to a tier, and from a tier to a release. Pure functions: a decision can be logged and replayed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. `reason` is one word, and after a colon what it rests on; `score` is None when not asked."""

    tier: str
    reason: str
    score: float | None = None


def route(score: float, threshold: float, tiers: Sequence[str]) -> Route:
    """`tiers` from cheap to expensive: at or above the threshold the last, below it the first."""
    tier, sign = (tiers[-1], ">=") if score >= threshold else (tiers[0], "<")
    return Route(tier, f"score:{score:.3f}{sign}{threshold:g}", score)


def assign(salt: str, unit: str, weights: Mapping[str, float]) -> str:
    """The arm of a unit: its salted hash is a point in [0, 1), the arms are intervals as wide as their weights.

    The same unit gets the same arm while the weights stay. Kohavi et al. 2020, "Trustworthy Online Controlled
    Experiments", chapter 4, on hashing users to buckets.
    """
    digest = hashlib.blake2b(f"{salt}\0{unit}".encode(), digest_size=8).digest()
    point = int.from_bytes(digest, "big") / 2**64 * sum(weights.values())
    upper = 0.0
    for arm, weight in weights.items():
        upper += weight
        if point < upper:
            return arm
    return [arm for arm, weight in weights.items() if weight > 0][-1]  # the point fell on the rounding at the end
