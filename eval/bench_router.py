"""`gearshift bench router`: the scorers on public data, under fixed protocols, beside the published figures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gearshift.eval import routing_data
from gearshift.eval.bench import Bar, Report, collect
from gearshift.eval.routing_data import Labelled, Mask, without_near_copies
from gearshift.platform.embedding import Embedder
from gearshift.platform.weights.source import Progress
from gearshift.router import calibrate, metrics
from gearshift.router.learned import EMBEDDED, Kind, Learned, train
from gearshift.router.metrics import Numbers
from gearshift.router.policy import TierFacts, choose, named
from gearshift.router.score import LengthScorer

SEEDS = 5
FLOOR = 0.95
UNLABELLED = 500
RESAMPLES = 200
STEP_OF_PRICES = 200


@dataclass(slots=True)
class RouterBench:
    """One run. Fills a report and keeps the curves for the plot: name -> (share of strong calls in %, gap recovered)."""

    folder: Path
    encoder: Path | None
    progress: Progress
    report: Report
    curves: dict[str, tuple[Numbers, Numbers]]

    def run(self) -> None:
        parts = (self._mmlu, self._gsm8k, self._mt_bench, self._router_bench, self._calibration)
        for number, part in enumerate(parts):
            self.progress("public data", number, len(parts))
            part()
        self.progress("public data", len(parts), len(parts))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Scorers that are trained here; those that need embeddings only with an encoder."""
        return ("features", "tfidf", "blend", *(EMBEDDED if self.encoder else ()))

    def _embedded(self, data: Labelled) -> Labelled:
        if self.encoder is None:
            return data
        texts = [query.text for query in data.queries]
        return data.embedded(Embedder(self.encoder).embed(texts, lambda n, of: self.progress("embeddings", n, of)))

    def _mmlu(self) -> None:
        data = self._embedded(routing_data.mmlu(self.folder))
        splits = [data.folds[f"gold1531_seed{seed}"] for seed in range(SEEDS)]
        masks = [(split == "train", split == "test") for split in splits]
        masks = [(without_near_copies(data.queries, rows, test), test) for rows, test in masks]
        for name, runs in self._every_scorer(data, masks):
            self._curves_of(f"MMLU, 1,531 labels: {name}", runs)
        subjects = [(data.folds["subject_fold"] != fold, data.folds["subject_fold"] == fold) for fold in "01234"]
        subjects = [(without_near_copies(data.queries, rows, test), test) for rows, test in subjects]
        for name, runs in self._every_scorer(data, subjects):
            self._curves_of(f"MMLU, unseen subjects: {name}", runs)
        self._bar("MMLU, 1,531 labels: tfidf: APGR", 0.64, "min")
        self._bar("MMLU, 1,531 labels: tfidf: CPT50", 31, "max")
        self._bar("MMLU, 1,531 labels: tfidf: CPT80", 64, "max")
        self._bar(f"MMLU, unseen subjects: {'semantic' if self.encoder else 'features'}: APGR", 0.65, "min")
        self._cost(train("tfidf", data.examples(masks[0][0])), data)

    def _cost(self, scorer: Learned, data: Labelled) -> None:
        """One query at a time, as the gateway asks."""
        spent = []
        for start in range(0, 1000, 200):
            begun = time.process_time()
            for query in data.queries[start : start + 200]:
                scorer.score(query)
            spent.append((time.process_time() - begun) * 1000 / 200)
        self.report.results.append(collect("CPU of a score: tfidf", "ms", spent))
        self._bar("CPU of a score: tfidf", 2.0, "max")

    def _gsm8k(self) -> None:
        data = self._embedded(routing_data.gsm8k(self.folder))
        folds = [(data.folds["cv_fold"] != fold, data.folds["cv_fold"] == fold) for fold in "01234"]
        for name, runs in self._every_scorer(data, folds):
            self._curves_of(f"GSM8K, in-domain folds: {name}", [_joined(runs)])
        judged = [_tested(train("answer", data.examples(rows)), data, test) for rows, test in folds]
        self._curves_of("GSM8K, in-domain folds: cascade", [_joined(judged)])
        self._bar("GSM8K, in-domain folds: tfidf: APGR", 0.65, "min")
        self._bar("GSM8K, in-domain folds: cascade: APGR", 0.75, "min")

    def _mt_bench(self) -> None:
        """Trained on all of MMLU: nothing here is of the same kind, and 72 questions prove nothing."""
        source, data = routing_data.mmlu(self.folder), routing_data.mt_bench(self.folder)
        everything = np.ones(len(source.queries), dtype=bool)
        for name, scores in (
            ("length", _lengths(data)),
            ("tfidf", _score(train("tfidf", source.examples(everything)), data)),
        ):
            run = Scored(scores, data.weak, data.strong)
            value = run.apgr(np.arange(len(scores)))
            low, high = metrics.interval(run.apgr, len(scores))
            self.report.results.append(
                collect(f"MT-Bench, trained on MMLU: {name}: APGR", "95 % interval", [low, value, high])
            )

    def _router_bench(self) -> None:
        data = self._embedded(routing_data.router_bench(self.folder))
        rows, test = data.folds["split"] == "train", data.folds["split"] == "test"
        rows = without_near_copies(data.queries, rows, test)
        for kind in self.kinds:
            saved = _saved_by_prices(train(kind, data.examples(rows)), data, rows, test)
            self.report.results.append(
                collect(f"RouterBench, 11 models: {kind}: cost saved at 95 %", "%", [100 * saved])
            )
        zero = _saved_by_mixing(data, test)
        self.report.results.append(
            collect("RouterBench, 11 models: zero router: cost saved at 95 %", "%", [100 * zero])
        )
        self._bar("RouterBench, 11 models: tfidf: cost saved at 95 %", 64, "min")

    def _calibration(self) -> None:
        """A threshold taken to other traffic, and a promised quality."""
        data, other = routing_data.mmlu(self.folder), routing_data.gsm8k(self.folder)
        rows = data.folds["gold1531_seed0"] == "train"
        scorer = train("tfidf", data.examples(rows))
        moved, rng = _score(scorer, other), np.random.default_rng(0)
        old = calibrate.for_share(_score(scorer, data)[~rows], 0.5)
        stale = abs(float((moved >= old).mean()) - 0.5)
        fresh = []
        for _ in range(RESAMPLES):
            order = rng.permutation(len(moved))
            seen, new = moved[order[:UNLABELLED]], moved[order[UNLABELLED:]]
            fresh.append(100 * abs(float((new >= calibrate.for_share(seen, 0.5)).mean()) - 0.5))
        self.report.results.append(
            collect("half expensive, MMLU's threshold on GSM8K: off by", "points", [100 * stale])
        )
        self.report.results.append(collect("half expensive, threshold of 500 new queries: off by", "points", fresh))
        self._bar("half expensive, threshold of 500 new queries: off by", 3.0, "max")
        scores, weak, strong = (each[~rows] for each in (_score(scorer, data), data.weak, data.strong))
        missed, saved = _promises(scores, weak, strong)
        self.report.results.append(
            collect("quality floor of 95 %, bound of 95 %: missed", "% of 200 resamples", [missed])
        )
        self.report.results.append(collect("quality floor of 95 %, bound of 95 %: strong calls saved", "%", saved))
        self._bar("quality floor of 95 %, bound of 95 %: missed", 10.0, "max")

    def _every_scorer(self, data: Labelled, masks: Sequence[tuple[Mask, Mask]]) -> Iterator[tuple[str, list[Scored]]]:
        yield "length", [Scored(_lengths(data)[test], data.weak[test], data.strong[test]) for _, test in masks]
        for kind in self.kinds:
            yield kind, [_tested(train(kind, data.examples(rows)), data, test) for rows, test in masks]

    def _curves_of(self, name: str, runs: Sequence[Scored]) -> None:
        curves = [metrics.recovered(run.scores, run.weak, run.strong) for run in runs]
        add = self.report.results.append
        add(collect(f"{name}: APGR", "", [metrics.apgr(curve) for curve in curves]))
        add(collect(f"{name}: CPT50", "% strong", [metrics.cpt(curve, 0.5) for curve in curves]))
        add(collect(f"{name}: CPT80", "% strong", [metrics.cpt(curve, 0.8) for curve in curves]))
        saved = [100 * metrics.saved_at(FLOOR, run.scores, run.weak, run.strong) for run in runs]
        add(collect(f"{name}: saved at 95 %", "% strong", saved))
        grid = np.linspace(0, 1, 101)
        resampled = [np.interp(grid, np.linspace(0, 1, len(curve)), curve) for curve in curves]
        self.curves[name] = (100 * grid, np.mean(resampled, axis=0))
        best = [metrics.recovered(metrics.oracle(run.weak, run.strong), run.weak, run.strong) for run in runs]
        ceiling = [np.interp(grid, np.linspace(0, 1, len(curve)), curve) for curve in best]
        self.curves.setdefault(f"{name.partition(':')[0]}: oracle", (100 * grid, np.mean(ceiling, axis=0)))

    def _bar(self, name: str, limit: float, direction: str) -> None:
        """On the mean of the result's values."""
        result = next(each for each in self.report.results if each.name == name)
        self.report.bars.append(Bar(name, float(np.mean(result.values)), limit, "max" if direction == "max" else "min"))


@dataclass(frozen=True, slots=True)
class Scored:
    """Test rows of one run."""

    scores: Numbers
    weak: Numbers
    strong: Numbers

    def apgr(self, rows: NDArray[np.intp]) -> float:
        return metrics.apgr(metrics.recovered(self.scores[rows], self.weak[rows], self.strong[rows]))


def _score(scorer: Learned, data: Labelled, rows: Mask | None = None) -> Numbers:
    places = range(len(data.queries)) if rows is None else np.flatnonzero(rows)
    found = scorer.qualities([data.queries[i] for i in places])
    gains: Numbers = found[:, -1] - found[:, 0]
    return gains


def _tested(scorer: Learned, data: Labelled, test: Mask) -> Scored:
    return Scored(_score(scorer, data, test), data.weak[test], data.strong[test])


def _joined(runs: Sequence[Scored]) -> Scored:
    """All folds as one test set: each row was scored by a model that had not seen it."""
    return Scored(*(np.concatenate([getattr(run, name) for run in runs]) for name in ("scores", "weak", "strong")))


def _lengths(data: Labelled) -> Numbers:
    scorer = LengthScorer()
    return np.array([scorer.score(replace(query, attempt=None)) for query in data.queries])


def _saved_by_prices(scorer: Learned, data: Labelled, rows: Mask, test: Mask) -> float:
    """Share of the best single model's cost that is saved at 95 % of its quality, over all thresholds."""
    prices = data.costs[rows].mean(axis=0)
    tiers = [TierFacts(name) for name in data.models]
    steps = named(tiers, (prices - prices[0]) / (prices[-1] - prices[0]))
    qualities = scorer.qualities([data.queries[i] for i in np.flatnonzero(test)])
    gains = [named(tiers, row - row[0]) for row in qualities]
    places = {name: place for place, name in enumerate(data.models)}
    outcomes = []
    for threshold in np.geomspace(0.001, 10, STEP_OF_PRICES):
        chosen = [places[choose(tiers, each, steps, float(threshold)).tier] for each in gains]
        at = np.arange(len(chosen)), np.array(chosen)
        outcomes.append((data.qualities[test][at].mean(), data.costs[test][at].mean()))
    return _saved(outcomes, data, test)


def _saved_by_mixing(data: Labelled, test: Mask) -> float:
    """RouterBench's zero router (Hu et al. 2024, arXiv 2403.12031, section 3): two single models, mixed by a coin."""
    singles = list(zip(data.qualities[test].mean(axis=0), data.costs[test].mean(axis=0), strict=True))
    mixes = [
        (q1 + share * (q2 - q1), c1 + share * (c2 - c1))
        for q1, c1 in singles
        for q2, c2 in singles
        for share in np.linspace(0, 1, 101)
    ]
    return _saved(mixes, data, test)


def _saved(outcomes: Sequence[tuple[float, float]], data: Labelled, test: Mask) -> float:
    best = int(data.qualities[test].mean(axis=0).argmax())
    wanted, full = FLOOR * data.qualities[test][:, best].mean(), data.costs[test][:, best].mean()
    return 1 - float(min((cost for quality, cost in outcomes if quality >= wanted), default=full) / full)


def _promises(scores: Numbers, weak: Numbers, strong: Numbers) -> tuple[float, list[float]]:
    """How often, in %, a promised quality is missed on rows that were not seen, and what the threshold saves, in %."""
    rng, missed, saved = np.random.default_rng(1), 0, []
    for _ in range(RESAMPLES):
        order = rng.permutation(len(scores))
        seen, new = order[:1500], order[1500:]
        threshold = calibrate.for_quality(scores[seen], weak[seen], strong[seen], FLOOR)
        routed = np.where(scores[new] >= threshold, strong[new], weak[new])
        missed += bool(routed.sum() < FLOOR * strong[new].sum())
        saved.append(100 * float((scores[new] < threshold).mean()))
    return 100 * missed / RESAMPLES, saved


def run_router_bench(
    folder: Path, encoder: Path | None, report: Report, progress: Progress
) -> dict[str, tuple[Numbers, Numbers]]:
    """Fills the report; returns curves for the plot."""
    bench = RouterBench(folder, encoder, progress, report, {})
    bench.run()
    return bench.curves
