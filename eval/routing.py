"""From answered questions to a scorer, a calibration and a report. What `gearshift router …` does, without its screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gearshift.eval.answered import Answered, examples, qualities, queries, seconds, tier_names
from gearshift.platform.config import Config
from gearshift.platform.errors import ConfigError
from gearshift.platform.weights.source import Progress, no_progress
from gearshift.router import calibrate, metrics
from gearshift.router.artefact import Artefact, Card, data_hash, save
from gearshift.router.calibrate import Measured, Rows
from gearshift.router.calibration import Calibration, CascadeThreshold, Data, Interval, Target
from gearshift.router.features import Query
from gearshift.router.learned import EMBEDDED, Examples, Kind, train
from gearshift.router.metrics import Numbers
from gearshift.router.router import Router

FOLDS = 5


def split(rows: Sequence[Answered], name: str) -> list[Answered]:
    return [row for row in rows if row.split == name]


Embed = Callable[[Sequence[str]], NDArray[np.float32]]


def with_vectors(rows: Sequence[Answered], embed: Embed) -> Examples:
    """Labelled queries of answered questions, with their vectors."""
    data = examples(rows)
    vectors = embed([query.text for query in data.queries])
    return replace(
        data, queries=[replace(q, embedding=tuple(v.tolist())) for q, v in zip(data.queries, vectors, strict=True)]
    )


def embedder_of(source: str, progress: Progress = no_progress) -> Embed:
    """What computes the vectors of an encoder."""
    from gearshift.platform.embedding import Embedder
    from gearshift.platform.weights.source import ensure, parse

    embedder = Embedder(ensure(parse(source), progress).path)
    return lambda texts: embedder.embed(texts, lambda done, total: progress("embedding", done, total))


def reader(config: Config, router: Router) -> Callable[[str], Query]:
    """From a text to the query that this router would look at in a deployment of this config."""
    if not router.needs_embedding or config.embedding is None:
        return Query
    embed = embedder_of(config.embedding.source)
    return lambda text: Query(text, embedding=tuple(embed([text])[0].tolist()))


def _data(rows: Sequence[Answered], kind: str, encoder: str, progress: Progress = no_progress) -> Examples:
    return with_vectors(rows, embedder_of(encoder, progress)) if kind in EMBEDDED else examples(rows)


def cross_fitted(kind: Kind, data: Examples, seed: int = 0) -> Numbers:
    """Gains of the most expensive tier, each row's by a scorer that has not seen it: [n]."""
    folds = np.random.default_rng(seed).permutation(len(data.queries)) % FOLDS
    gains: Numbers = np.zeros(len(data.queries))
    for fold in range(FOLDS):
        seen, left = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        scorer = train(kind, Examples([data.queries[int(i)] for i in seen], data.qualities[seen]))
        found = scorer.qualities([data.queries[int(i)] for i in left])
        gains[left] = found[:, -1] - found[:, 0]
    return gains


def train_scorer(
    rows: Sequence[Answered],
    kind: Kind,
    path: Path,
    source: str,
    encoder: str = "",
    progress: Progress = no_progress,
) -> Artefact:
    """encoder: source of the vectors, for a kind that looks at them. Raises `ConfigError` when the rows teach nothing."""
    names, data = tier_names(rows), _data(rows, kind, encoder, progress)
    try:
        gains = cross_fitted(kind, data)
        scorer = train(kind, data)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    weak, strong = data.qualities[:, 0], data.qualities[:, -1]
    told = {f"quality of {name}": float(value) for name, value in zip(names, data.qualities.mean(axis=0), strict=True)}
    if strong.sum() > weak.sum():
        curve = metrics.recovered(gains, weak, strong)
        told |= {"APGR": metrics.apgr(curve), "CPT50": metrics.cpt(curve, 0.5), "CPT80": metrics.cpt(curve, 0.8)}
    card = Card(
        kind=kind,
        tiers=names,
        rows=len(rows),
        data=data_hash(data),
        source=source,
        encoder=encoder if kind in EMBEDDED else "",
        metrics={name: round(value, 4) for name, value in told.items()},
    )
    return save(path, scorer, card)


def gains_on(rows: Sequence[Answered], artefact: Artefact) -> Numbers:
    """[n]. Rows that the scorer was trained on get the gains of scorers that have not seen them."""
    data = _data(rows, artefact.card.kind, artefact.card.encoder)
    if artefact.card.tiers != tier_names(rows):
        raise ConfigError(
            f"the scorer was trained for the tiers {', '.join(artefact.card.tiers)}, the answers are of "
            f"{', '.join(tier_names(rows))}"
        )
    if data_hash(data) == artefact.card.data:
        return cross_fitted(artefact.card.kind, data)  # type: ignore[arg-type]
    found = artefact.scorer.qualities(data.queries)
    gains: Numbers = found[:, -1] - found[:, 0]
    return gains


def rows_of(answered: Sequence[Answered], scorer: Artefact, judge: Artefact | None, window: int | None) -> Rows:
    """`window`: judge the beginning of answers, as a stream's are."""
    quality, cost = qualities(answered), seconds(answered)
    if not cost.any():  # logged without their cost: count calls
        cost = np.tile(np.linspace(0.2, 1.0, cost.shape[1]), (len(cost), 1))
    confidences = np.empty(0) if judge is None else 1 - _judged(answered, judge, window)
    return Rows(gains_on(answered, scorer), confidences, quality[:, 0], quality[:, -1], cost[:, 0], cost[:, -1])


def _judged(answered: Sequence[Answered], judge: Artefact, window: int | None) -> Numbers:
    data = examples(answered)
    if data_hash(data) == judge.card.data:
        return cross_fitted(judge.card.kind, replace(data, queries=queries(answered, window)))  # type: ignore[arg-type]
    found = judge.scorer.qualities(queries(answered, window))
    gains: Numbers = found[:, -1] - found[:, 0]
    return gains


def calibrated(
    answered: Sequence[Answered],
    scorer: Artefact,
    judge: Artefact | None,
    target: Target,
    source: str,
    window: int | None,
) -> Calibration:
    """Raises `ConfigError` for a target that can't be met."""
    rows = rows_of(answered, scorer, judge, window)
    try:
        threshold, confidence = _thresholds(rows, target, judge is not None)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    told = calibrate.measured(rows, threshold, confidence)
    grid = np.quantile(rows.scores, np.linspace(0, 1, 21))
    return Calibration(
        scorer=scorer.digest,
        target=target,
        threshold=threshold,
        cascade=CascadeThreshold(threshold=max(-1.0, confidence), judge=judge.digest)
        if judge is not None and confidence is not None
        else None,
        expensive_share=_short(told.expensive_share),
        escalated_share=_short(told.escalated_share),
        saving=_interval(told.saving),
        quality=_interval(told.quality),
        quality_bound=_short(told.quality_bound),
        data=Data(rows=len(answered), hash=data_hash(examples(answered)), source=source),
        scores=[_short(value) for value in grid],
    )


def _thresholds(rows: Rows, target: Target, cascade: bool) -> tuple[float, float | None]:
    level = calibrate.LEVEL if target.bound else None
    if target.quality is not None and cascade:
        return calibrate.for_quality_with_cascade(rows, target.quality, level)
    if cascade:
        raise ValueError("a judge needs a quality to keep; leave it out, or set a quality")
    if target.quality is not None:
        return calibrate.for_quality(rows.scores, rows.weak, rows.strong, target.quality, level), None
    if target.expensive_share is not None:
        return calibrate.for_share(rows.scores, target.expensive_share), None
    assert target.dollars_per_1000 is not None
    return calibrate.for_cost(rows.scores, rows.cheap_costs, rows.expensive_costs, target.dollars_per_1000 / 1000), None


def _interval(estimate: calibrate.Estimate) -> Interval:
    return Interval(value=_short(estimate.value), low=_short(estimate.low), high=_short(estimate.high))


def _short(value: float) -> float:
    return float(f"{value:.6g}")


@dataclass(frozen=True, slots=True)
class Curve:
    """Quality over always-expensive, and cost over always-expensive, along the thresholds of one way to route."""

    name: str
    costs: Numbers
    qualities: Numbers


def curves(rows: Rows) -> list[Curve]:
    full, best = rows.expensive_costs.sum(), rows.strong.sum()

    def curve(name: str, orders: Sequence[tuple[Numbers, Numbers]]) -> Curve:
        return Curve(name, np.array([c.sum() / full for _, c in orders]), np.array([q.sum() / best for q, _ in orders]))

    def routed(scores: Numbers) -> list[tuple[Numbers, Numbers]]:
        marks = [*np.quantile(scores, np.linspace(0, 1, 101)), np.inf]
        done = [calibrate.outcome(replace(rows, scores=scores), float(mark), None) for mark in marks]
        return [(each.qualities, each.costs) for each in done]

    shares = np.linspace(0, 1, 21)
    coin = [
        (share * rows.strong + (1 - share) * rows.weak, share * rows.expensive_costs + (1 - share) * rows.cheap_costs)
        for share in shares
    ]
    found = [curve("random", coin), curve("router", routed(rows.scores))]
    # who knows both answers takes the cheap one wherever it is as good, and gives up the dearest gains first
    step = (rows.expensive_costs - rows.cheap_costs).clip(1e-9)
    value = np.where(rows.strong > rows.weak, (rows.strong - rows.weak) / step, -1.0)
    found.append(curve("oracle", routed(value)))
    if rows.confidences.size:
        marks = [*np.quantile(rows.confidences, np.linspace(0, 1, 101)), np.inf]
        done = [calibrate.outcome(rows, np.inf, float(mark)) for mark in marks]
        found.append(curve("cascade", [(each.qualities, each.costs) for each in done]))
    return found


def best_at(curve: Curve, floor: float) -> float:
    """The most that is saved, in 0 to 1, where the quality is at least `floor`."""
    fits = curve.costs[curve.qualities >= floor - 1e-9]
    return 1 - float(fits.min()) if fits.size else 0.0


def summary(rows: Rows, calibration: Calibration) -> Measured:
    confidence = calibration.cascade.threshold if calibration.cascade else None
    return calibrate.measured(rows, calibration.threshold, confidence)
