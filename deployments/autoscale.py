"""How many replicas a model should have, from what they have to do. Pure: who asks gives the time and the facts.

What a replica can take is told in what it really works on (tokens to compute, KV blocks), so that what is wanted does not depend
on how many there are; only the time to first token is relative to that. Both delays look back over what was wanted: more
replicas are started when all of the last seconds wanted them, and some are let go when none of the last minutes did.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gearshift.deployments.registry import Member
from gearshift.platform.config import Autoscaling
from gearshift.platform.telemetry import Recent

TOLERANCE = 0.1
"""A load this much beside a whole number of replicas moves nothing."""
COMFORTABLE = 0.7
"""Of the time to first token that is promised: above it no replica is let go."""


@dataclass(frozen=True, slots=True)
class Load:
    """Of one instance of a model. replicas: that answer; kv_usage: sum of the used shares of their caches; ttft_p95: in s, 0
    where nothing was answered; requests: that run and wait; held: in gateways, as there is no replica; steps: only grows."""

    replicas: int
    queued_tokens: int = 0
    kv_usage: float = 0.0
    ttft_p95: float = 0.0
    requests: int = 0
    held: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """why: what the number follows from, in words."""

    replicas: int
    why: str


def load_of(key: str, members: Iterable[Member]) -> Load:
    """From what replicas and gateways last said."""
    members = list(members)
    engines = [each for each in members if each.model == key]
    stats = [each.stats for each in engines]
    return Load(
        replicas=len(engines),
        queued_tokens=sum(each.queued_tokens for each in stats),
        kv_usage=sum(each.kv_blocks_used / each.kv_blocks_total for each in stats if each.kv_blocks_total),
        ttft_p95=max((each.ttft.p95 for each in engines), default=0.0),
        requests=sum(each.running + each.waiting for each in stats),
        held=sum(each.held.get(key, 0) for each in members),
        steps=sum(each.steps for each in stats),
    )


def demand(settings: Autoscaling, load: Load) -> tuple[float, str]:
    """Replicas that the load would fill, and by what."""
    return max(
        (load.queued_tokens / settings.target_queued_tokens, f"{load.queued_tokens} tokens are queued"),
        (load.kv_usage / settings.target_kv_usage, f"{load.kv_usage:.1f} KV caches are full"),
    )


class Autoscaler:
    """Owns what was wanted of one instance in the last minutes."""

    def __init__(self, settings: Autoscaling, now: float) -> None:
        self._settings = settings
        self._wanted: deque[tuple[float, int]] = deque()
        self._watched_since = self._busy_at = self._moved_at = now
        self._steps = 0

    def decide(self, now: float, load: Load, current: int) -> Decision | None:
        """Another number of replicas than the current one, or None. current: that there should be."""
        decision = self._awake(now, load, current) if current else self._asleep(now, load)
        if decision is not None:
            self._moved_at = now
        return decision

    def _asleep(self, now: float, load: Load) -> Decision | None:
        settings = self._settings
        self._wanted.clear()
        self._watched_since = self._busy_at = now
        if settings.min_replicas:
            return Decision(settings.min_replicas, "min_replicas")
        return Decision(1, f"requests wait for it: {load.held}") if load.held else None

    def _awake(self, now: float, load: Load, current: int) -> Decision | None:
        settings, watched = self._settings, now - self._watched_since
        bounded = min(max(current, settings.min_replicas), settings.max_replicas)
        if bounded != current:
            return Decision(bounded, "min_replicas and max_replicas")
        if self._busy(load, current):
            self._busy_at = now
        elif not settings.min_replicas and now - self._busy_at >= settings.downscale_to_zero_delay_s:
            return Decision(0, f"nobody asked for {settings.downscale_to_zero_delay_s:g} s")
        wanted, why = self._want(now, load, current)
        self._remember(now, wanted)
        least = min(self._wanted_since(now - settings.upscale_delay_s))
        if least > current and watched >= settings.upscale_delay_s:
            return Decision(least, why)
        most = max(self._wanted_since(now - settings.downscale_delay_s))
        if most < current and watched >= settings.downscale_delay_s:
            return Decision(most, f"no more were needed for {settings.downscale_delay_s:g} s")
        return None

    def _busy(self, load: Load, current: int) -> bool:
        """Or still starting; a request that came and went between two looks has left its steps."""
        moved, self._steps = load.steps != self._steps, load.steps
        return bool(moved or load.requests or load.held or load.queued_tokens or load.replicas < current)

    def _want(self, now: float, load: Load, current: int) -> tuple[int, str]:
        """Within the bounds, and at least one: to let the last one go is another matter."""
        settings = self._settings
        filled, why = demand(settings, load)
        wanted = current
        if filled > current * (1 + TOLERANCE):
            wanted = math.ceil(filled)
        elif filled < (current - 1) * (1 - TOLERANCE):
            wanted = math.ceil(filled / (1 - TOLERANCE))
        if settings.ttft_slo_s is not None:
            late = load.ttft_p95 / settings.ttft_slo_s
            if late > COMFORTABLE:
                wanted = max(wanted, current)
            told_by_these = now - self._moved_at > Recent.SECONDS and load.replicas >= current
            if late > 1 and told_by_these and (more := math.ceil(current * min(2.0, late))) > wanted:
                wanted, why = more, f"answers begin after {load.ttft_p95:.2f} s (p95)"
        return min(max(wanted, 1, settings.min_replicas), settings.max_replicas), why

    def _remember(self, now: float, wanted: int) -> None:
        self._wanted.append((now, wanted))
        longest = max(self._settings.upscale_delay_s, self._settings.downscale_delay_s)
        while self._wanted[0][0] < now - longest:
            self._wanted.popleft()

    def _wanted_since(self, since: float) -> Iterator[int]:
        return (wanted for at, wanted in self._wanted if at >= since)
