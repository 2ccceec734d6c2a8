"""Whose turn it is: tenants of one class share by tokens served, not by requests sent.

The Virtual Token Counter of Sheng et al. 2024, "Fairness in Serving Large Language Models" (OSDI, arXiv 2401.00588),
algorithm 2: each tenant has a counter of the tokens it was served, weighted; the one with the lowest goes next; one that
comes back is lifted to the others, so that nobody saves up credit while away. Two tenants that both wait never differ
by more than 2 max(w_p L_input, w_q M), with L_input the longest prompt and M the tokens that fit the cache (theorem 4.4).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from gearshift.platform.engine.sequence import Sequence

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""w_p and w_q: an output token costs more than an input token, which is computed with many others at once."""


def bound(longest_input: int, cache_tokens: int) -> float:
    """The most that two backlogged tenants can differ, in weighted tokens."""
    return 2 * max(INPUT_WEIGHT * longest_input, OUTPUT_WEIGHT * cache_tokens)


class FairQueue:
    """Waiting sequences of one class, and the counters of their tenants."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Sequence]] = {}
        self.served: dict[str, float] = {}
        self._last = 0.0  # counter of the tenant that left the queue last

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._waiting.values():
            yield from sequences

    def add(self, sequence: Sequence) -> None:
        """In order of arrival: one that was preempted goes before those that came after it."""
        if sequence.tenant not in self._waiting:
            floor = min((self.served[tenant] for tenant in self._waiting), default=self._last)
            self.served[sequence.tenant] = max(self.served.get(sequence.tenant, 0.0), floor)
            self._waiting[sequence.tenant] = []
        insort(self._waiting[sequence.tenant], sequence, key=_arrival)

    def first(self) -> Sequence:
        """The oldest of the tenant that was served least."""
        tenant = min(self._waiting, key=self.served.__getitem__)
        return self._waiting[tenant][0]

    def remove(self, sequence: Sequence) -> None:
        mine = self._waiting[sequence.tenant]
        mine.remove(sequence)
        if not mine:
            del self._waiting[sequence.tenant]
            self._last = self.served[sequence.tenant]

    def charge(self, tenant: str, inputs: int = 0, outputs: int = 0) -> None:
        """Inputs count when a request is admitted, so that the next choice knows; outputs as they come."""
        self.served[tenant] = self.served.get(tenant, 0.0) + INPUT_WEIGHT * inputs + OUTPUT_WEIGHT * outputs

    @property
    def dispersion(self) -> float:
        """Weighted tokens between the most and the least served tenant of those that wait."""
        counters = [self.served[tenant] for tenant in self._waiting]
        return max(counters) - min(counters) if counters else 0.0


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
