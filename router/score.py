"""Scorers: how much a query would gain from the expensive tier. Those here need no training."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Protocol

from gearshift.router.features import Query
from gearshift.router.signals import signals


class Scorer(Protocol):
    def score(self, query: Query) -> float:
        """The estimated gain in quality of the most expensive tier over the cheapest, in -1 to 1."""
        ...

    def why(self, query: Query) -> list[tuple[str, float]]:
        """What in the query raises the score or lowers it, each with its weight."""
        ...


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

    def score(self, query: Query) -> float:
        return 1 / (1 + math.exp(-self.BIAS - sum(weight for _, weight in self.why(query))))

    def why(self, query: Query) -> list[tuple[str, float]]:
        found = signals(query.text, query.turns)
        return [(name, weight * math.log1p(getattr(found, name))) for name, weight in self.WEIGHTS.items()]


class LengthScorer:
    """Longer queries gain more; half at 100 words. The baseline that training on other data rarely beats."""

    def score(self, query: Query) -> float:
        return 1 - math.exp2(-len(query.text.split()) / 100)

    def why(self, query: Query) -> list[tuple[str, float]]:
        return [("words", float(len(query.text.split())))]


class RandomScorer:
    """The baseline every scorer must beat. The same query always gets the same number, so that answers repeat."""

    def score(self, query: Query) -> float:
        digest = hashlib.blake2b(f"{query.turns}:{query.text}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    def why(self, query: Query) -> list[tuple[str, float]]:
        return [("chance", self.score(query))]


SCORERS: Mapping[str, Callable[[], Scorer]] = {
    "features": FeatureScorer, "length": LengthScorer, "random": RandomScorer,
}  # fmt: skip
