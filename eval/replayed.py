"""Logged requests through another policy: where they would have gone, and what that would have cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gearshift.eval import jsonl
from gearshift.eval.routing import reader
from gearshift.platform.config import Config
from gearshift.platform.errors import ConfigError
from gearshift.router.features import Query
from gearshift.router.policy import Asked, choose, named, price_steps, rules
from gearshift.router.router import Router


class Logged(msgspec.Struct, frozen=True):
    """What is read of a record. The rest is ignored: other versions write other fields."""

    asked: str
    tier: str
    score: float | None = None
    scorer: str = ""
    query: str = ""
    cost_dollars: float = 0.0
    usage: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    tiers: tuple[str, ...]
    before: Counter[str]
    after: Counter[str]
    moved: int
    dollars_before: float
    dollars_after: float
    gained: float
    """Sum of the estimated gains of the tiers chosen now, less of those chosen then."""
    skipped: int
    """Requests that the router had not chosen for, or whose answer came from a cache."""

    def as_json(self) -> dict[str, Any]:
        return {
            "before": dict(self.before), "after": dict(self.after), "moved": self.moved, "skipped": self.skipped,
            "dollars": {"before": self.dollars_before, "after": self.dollars_after}, "estimated_gain": self.gained,
        }  # fmt: skip

    def line(self) -> str:
        total = sum(self.before.values())
        each = self.gained / total if total else 0.0
        return (
            f"{self.moved} of {total} requests would go elsewhere; expected quality {each:+.4f} a request by the new scorer. "
            f"{self.skipped} records were not routed by a score."
        )


def replay(log: Path, config: Config) -> Replay:
    """Raises `ConfigError` when the log can't tell what the new scorer would say."""
    router = Router(config)
    read = reader(config, router)
    names = tuple(config.tiers)
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    moved = skipped = 0
    dollars = [0.0, 0.0]
    gained = 0.0
    for number, record in enumerate(jsonl.read(log, Logged), 1):
        if record.score is None or record.usage is None or record.tier not in config.tiers:
            skipped += 1
            continue
        gains = _gains(router, read, record, f"{log}:{number}")
        asked = Asked(prompt_tokens=record.usage[0], wished_tokens=record.usage[1])
        ruled = rules(router.tiers, asked)
        steps = named(ruled.tiers, price_steps(ruled.tiers, asked))
        tier = choose(ruled.tiers, gains, steps, router.threshold).tier
        before[record.tier] += 1
        after[tier] += 1
        moved += tier != record.tier
        gained += gains[tier] - gains[record.tier]
        dollars[0] += record.cost_dollars
        facts = next(each for each in router.tiers if each.name == tier)
        dollars[1] += facts.cost(asked.prompt_tokens, asked.wished_tokens) / 1e6
    return Replay(names, before, after, moved, dollars[0], dollars[1], gained, skipped)


def _gains(router: Router, read: Callable[[str], Query], record: Logged, where: str) -> dict[str, float]:
    if record.query:
        return named(router.tiers, router.gains(read(record.query)))
    if record.scorer == router.scorer_id and len(router.tiers) == 2:
        return named(router.tiers, (0.0, record.score or 0.0))
    raise ConfigError(
        f"{where}: has neither the query nor a score of the new scorer; log with telemetry.record_queries: true"
    )
