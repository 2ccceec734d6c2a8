"""Scorers: how much a query would gain from the expensive tier, as a number in [0, 1)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Protocol

from gearshift.router.signals import signals


class Scorer(Protocol):
    def score(self, query: str, turns: int = 1) -> float: ...


class FeatureScorer:
    """A logistic model with weights set by hand: a first guess, until a scorer is trained on data.

    The weights are per unit of log(1 + count): the first mark of a kind tells most.
    """

    BIAS = -2.2
    WEIGHTS: Mapping[str, float] = {
        "words": 0.25,
        "digits": 0.15,
        "operators": 1.0,
        "code": 1.6,
        "reasoning": 1.6,
        "constraints": 0.7,
        "turns": 0.1,
    }

    def score(self, query: str, turns: int = 1) -> float:
        found = signals(query, turns)
        logit = self.BIAS + sum(weight * math.log1p(getattr(found, name)) for name, weight in self.WEIGHTS.items())
        return 1 / (1 + math.exp(-logit))


class RandomScorer:
    """The baseline every scorer must beat. The same query always gets the same number, so that answers repeat."""

    def score(self, query: str, turns: int = 1) -> float:
        digest = hashlib.blake2b(f"{turns}:{query}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64


SCORERS: Mapping[str, Callable[[], Scorer]] = {"features": FeatureScorer, "random": RandomScorer}
