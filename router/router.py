"""The router of one deployment: reads its files once, then decides. Everything it decides comes from pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gearshift.platform.config import Config
from gearshift.platform.errors import ConfigError
from gearshift.router import artefact, policy
from gearshift.router.answers import Attempt, confidence, failure
from gearshift.router.calibration import Calibration
from gearshift.router.drift import Drift
from gearshift.router.features import Query
from gearshift.router.learned import Learned
from gearshift.router.policy import Asked, Route, TierFacts
from gearshift.router.score import SCORERS, Scorer

DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of an answer of the cheap tier. `reason` goes into the route's reason."""

    accepted: bool
    confidence: float
    reason: str


class Router:
    """Raises `ConfigError` when a file is missing, damaged, or made for other tiers or for another scorer."""

    def __init__(self, config: Config) -> None:
        settings = config.router
        self.tiers = tuple(facts(config, name) for name in config.tiers)
        self.settings = settings
        self._encoder = config.embedding.source if config.embedding is not None else ""
        self.calibration = Calibration.read(Path(settings.calibration)) if settings.calibration else None
        self.scorer_id: str = settings.scorer
        self._learned: Learned | None = None
        self._plain: Scorer = SCORERS[settings.scorer]()
        if settings.artefact is not None:
            self._learned, self.scorer_id = self._load("artefact", settings.artefact, tuple(config.tiers))
        if self.calibration is not None and self.calibration.scorer != self.scorer_id:
            raise ConfigError(
                f"router.calibration: {settings.calibration} was made for the scorer {self.calibration.scorer}, the config has "
                f"{self.scorer_id}; run `gearshift router calibrate` for it"
            )
        by_hand = DEFAULT_THRESHOLD if settings.threshold is None else settings.threshold
        self.threshold = self.calibration.threshold if self.calibration else by_hand
        self._judge, self.cascade_threshold, digest = self._cascade(config)
        self.judge_id = f"{digest}:{self.cascade_threshold}"
        """Changes whenever an answer may be judged otherwise."""

    def _load(self, key: str, path: str, tiers: tuple[str, ...]) -> tuple[Learned, str]:
        loaded = artefact.load(Path(path))
        if (loaded.card.kind == "answer") != (key == "cascade.judge"):
            raise ConfigError(
                f"router.{key}: {path} is of kind {loaded.card.kind}; a judge is of kind answer, and a scorer of any other"
            )
        if loaded.card.tiers != tiers:
            raise ConfigError(
                f"router.artefact: {path} was trained for the tiers {', '.join(loaded.card.tiers)}, the config has "
                f"{', '.join(tiers)}; train it on answers of these"
            )
        if loaded.scorer.needs_embedding and (made := self._encoder) != loaded.card.encoder:
            raise ConfigError(
                f"router.artefact: {path} needs vectors of queries by {loaded.card.encoder}, and "
                + (
                    f"embedding.source is {made}; train it for that"
                    if made
                    else "nothing makes any; add `embedding: {}`"
                )
            )
        return loaded.scorer, loaded.digest

    def _cascade(self, config: Config) -> tuple[Learned | None, float | None, str]:
        cascade = config.router.cascade
        if cascade is None:
            return None, None, ""
        judge, digest = self._load("cascade.judge", cascade.judge, tuple(config.tiers)) if cascade.judge else (None, "")
        if cascade.threshold is not None:
            return judge, cascade.threshold, digest
        calibrated = self.calibration.cascade if self.calibration else None
        if calibrated is None or calibrated.judge != digest:
            raise ConfigError("router.cascade: the calibration has no threshold for this judge; calibrate with it")
        return judge, calibrated.threshold, digest

    @property
    def needs_embedding(self) -> bool:
        """Whether the vector of a query says something here; without one the score is made of the rest."""
        return self._learned is not None and self._learned.needs_embedding

    def drift(self) -> Drift | None:
        """Watches whether the calibration still fits; None without one."""
        if self.calibration is None:
            return None
        judged = 1 - self.calibration.expensive_share
        share = self.calibration.escalated_share / judged if self.cascade_threshold is not None and judged else None
        return Drift(self.calibration.scores, share)

    def gains(self, query: Query) -> tuple[float, ...]:
        """Of each tier over the cheapest."""
        if self._learned is not None:
            return self._learned.gains(query)
        return policy.gains_of(self._plain.score(query), self.tiers)

    def why(self, query: Query) -> list[tuple[str, float]]:
        """What in the query raises the score (above 0) or lowers it, strongest first."""
        if self._learned is not None:
            return self._learned.why(query)
        return sorted(self._plain.why(query), key=lambda item: -abs(item[1]))

    def threshold_at(self, load: float, base: float | None = None) -> float:
        """`base`: the threshold without load, where an experiment has chosen another one."""
        pressure, base = self.settings.pressure, self.threshold if base is None else base
        return policy.pressed(base, load, pressure.start, pressure.most) if pressure else base

    def route(self, query: Query, asked: Asked, load: float = 0.0, base: float | None = None) -> Route:
        """`load`: 0 to 1, of the expensive tier's queue or of the tenant's budget, whichever is nearer its limit."""
        ruled = policy.rules(self.tiers, asked)
        if len(ruled.tiers) == 1:
            return Route(ruled.tiers[0].name, ruled.decided or "only")
        threshold = self.threshold_at(load, base)
        notes = [*ruled.notes, *([f"load:{load:.2f}"] if threshold != self.threshold_at(0.0, base) else [])]
        note = f" {' '.join(notes)}" if notes else ""
        gains = policy.named(self.tiers, self.gains(query))
        steps = policy.named(ruled.tiers, policy.price_steps(ruled.tiers, asked))
        return policy.choose(ruled.tiers, gains, steps, threshold, note)

    def verifies(self, route: Route) -> bool:
        """Whether the answer of the tier is judged before the client sees it."""
        return (
            self.cascade_threshold is not None
            and route.score is not None
            and bool(route.others)
            and route.tier == self.tiers[0].name
        )

    def judge(self, query: Query, attempt: Attempt) -> Judgement:
        """Confidence is 1 less the gain that the judge still expects of the expensive tier, or the model's own certainty."""
        assert self.cascade_threshold is not None
        if failed := failure(attempt):
            return Judgement(False, 0.0, f"cascade:{failed}")
        if self._judge is None:
            value = confidence(attempt)
        else:
            told = Query(query.text, query.turns, query.tools, query.embedding, attempt)
            value = 1.0 - self._judge.score(told)
        accepted = value >= self.cascade_threshold
        return Judgement(accepted, value, f"cascade:{value:.3f}{'>=' if accepted else '<'}{self.cascade_threshold:.3g}")


def facts(config: Config, name: str) -> TierFacts:
    tier = config.tiers[name]
    lengths = [config.models[config.releases[r].model].max_model_len for r in config.releases_of(name)]
    context = tier.context or min((length for length in lengths if length), default=None)
    return TierFacts(name, tier.price.input, tier.price.output, tier.quality, context, frozenset(tier.abilities))
