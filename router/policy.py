"""From a score to a tier. Pure functions: a decision can be logged, explained and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

USUAL_ANSWER = 256
"""Tokens of an answer whose length nobody knows, for comparing prices."""
ABILITIES = ("tools", "json", "vision")


@dataclass(frozen=True, slots=True)
class TierFacts:
    """What the choice rests on. Tiers are listed from cheap to expensive."""

    name: str
    price_input: float = 0.0
    """US dollars a million tokens, as `price_output`."""
    price_output: float = 0.0
    quality: float | None = None
    """Expected quality in 0 to 1 of an average query; used where the scorer knows nothing of tiers in the middle."""
    context: int | None = None
    """Tokens of prompt and answer."""
    abilities: frozenset[str] = frozenset(ABILITIES)

    def cost(self, prompt_tokens: int, answer_tokens: int) -> float:
        return self.price_input * prompt_tokens + self.price_output * answer_tokens


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request needs and what its tenant may have, as far as it concerns the choice of a tier."""

    prompt_tokens: int = 0
    wished_tokens: int = 0
    """Of the answer, as far as the request says so."""
    needs: frozenset[str] = frozenset()
    forced: str = ""
    """By header."""
    pinned: str = ""
    """By the tenant's config."""
    allowed: frozenset[str] | None = None
    """None allows all."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. `reason` is one word, and after a colon what it rests on; `score` is None when not asked."""

    tier: str
    reason: str
    score: float | None = None
    others: tuple[str, ...] = ()
    """Where it may fall back to, best first."""


@dataclass(frozen=True, slots=True)
class Ruled:
    """Which tiers the hard rules leave, and what they say."""

    tiers: tuple[TierFacts, ...]
    notes: tuple[str, ...] = ()
    decided: str = ""
    """The reason when the rules leave nothing to a score."""


def rules(tiers: Sequence[TierFacts], asked: Asked) -> Ruled:
    """The hard rules, in their order: pinned, forced, allow-list, context, abilities. A pinned or forced tier is taken as it
    is, even where it can't serve the request: whoever asked for it learns why. Nobody forces a tier that is not allowed."""
    for name, word in ((asked.pinned, "pinned"), (asked.forced, "forced")):
        chosen = [tier for tier in tiers if tier.name == name and (word == "pinned" or _allowed(tier, asked))]
        if chosen:
            return Ruled(tuple(chosen), decided=word)
    left, notes = list(tiers), []
    for note, fits in _CHECKS:
        kept = [tier for tier in left if fits(tier, asked)]
        if not kept:  # no tier can: the first that is tried says what is wrong, better than a rule could
            continue
        if len(kept) < len(left):
            notes.append(note)
        left = kept
    decided = f"rule:{'+'.join(notes)}" if len(left) == 1 and notes else ""
    return Ruled(tuple(left), tuple(notes), decided)


def _allowed(tier: TierFacts, asked: Asked) -> bool:
    return asked.allowed is None or tier.name in asked.allowed


_CHECKS: tuple[tuple[str, Callable[[TierFacts, Asked], bool]], ...] = (
    ("allow-list", _allowed),
    ("context", lambda tier, asked: tier.context is None or asked.prompt_tokens + asked.wished_tokens <= tier.context),
    ("abilities", lambda tier, asked: asked.needs <= tier.abilities),
)


def gains_of(score: float, tiers: Sequence[TierFacts]) -> tuple[float, ...]:
    """Gains over the cheapest tier from one score, the gain of the most expensive: tiers between get their share by the
    qualities in the config, or evenly."""
    if len(tiers) == 1:
        return (0.0,)
    known = [tier.quality for tier in tiers if tier.quality is not None]
    if len(known) == len(tiers) and known[-1] > known[0]:
        shares = [(quality - known[0]) / (known[-1] - known[0]) for quality in known]
    else:
        shares = [place / (len(tiers) - 1) for place in range(len(tiers))]
    return tuple(score * share for share in shares)


def price_steps(tiers: Sequence[TierFacts], asked: Asked) -> tuple[float, ...]:
    """What each tier costs for this request above the cheapest, as a share of the step to the most expensive."""
    costs = [tier.cost(asked.prompt_tokens, asked.wished_tokens or USUAL_ANSWER) for tier in tiers]
    if costs[-1] <= costs[0]:  # no prices, or none that rise: by place
        return tuple(place / max(1, len(tiers) - 1) for place in range(len(tiers)))
    return tuple((cost - costs[0]) / (costs[-1] - costs[0]) for cost in costs)


def choose(
    tiers: Sequence[TierFacts],
    gains: Mapping[str, float],
    steps: Mapping[str, float],
    threshold: float,
    note: str = "",
) -> Route:
    """The tier with the most gain after its price: the threshold is the gain that is worth the whole step from the cheapest
    to the most expensive tier, and a part of the step needs that part of it. Ties go to the more expensive one.

    With two tiers: the expensive one exactly when its gain reaches the threshold.
    """
    ranked = sorted(
        range(len(tiers)), key=lambda i: (gains[tiers[i].name] - threshold * steps[tiers[i].name], i), reverse=True
    )
    best = tiers[ranked[0]].name
    score = gains[tiers[-1].name] - gains[tiers[0].name]
    sign = ">=" if best == tiers[-1].name else "<" if best == tiers[0].name else "~"
    others = tuple(tiers[i].name for i in ranked[1:])
    return Route(best, f"score:{score:.3f}{sign}{threshold:.3g}{note}", score, others)


def pressed(threshold: float, load: float, start: float, most: float) -> float:
    """The threshold under load: unchanged up to `start`, `most` higher at full load (1.0), in a line between. A function of
    the present load alone, so it goes back by itself."""
    if start >= 1.0:
        return threshold
    return threshold + most * min(1.0, max(0.0, (load - start) / (1.0 - start)))


def named(tiers: Iterable[TierFacts], values: Sequence[float]) -> dict[str, float]:
    return {tier.name: value for tier, value in zip(tiers, values, strict=True)}
