"""Public routing data as labelled queries: the files of a folder, described in docs/routing.md."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gearshift.platform.errors import ConfigError
from gearshift.router.answers import Attempt
from gearshift.router.features import Query
from gearshift.router.learned import Examples
from gearshift.router.metrics import Numbers

Mask = NDArray[np.bool_]
NEAR = 0.95
"""Cosine of two queries' words from which on they are the same query."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """Queries with the quality of each model's answer, from cheap to expensive. `costs`: US dollars, where known."""

    queries: tuple[Query, ...]
    qualities: Numbers
    models: tuple[str, ...]
    folds: dict[str, NDArray[np.str_]]
    costs: Numbers

    @property
    def weak(self) -> Numbers:
        column: Numbers = self.qualities[:, 0]
        return column

    @property
    def strong(self) -> Numbers:
        column: Numbers = self.qualities[:, -1]
        return column

    def examples(self, rows: Mask) -> Examples:
        return Examples([self.queries[i] for i in np.flatnonzero(rows)], self.qualities[rows])

    def embedded(self, vectors: NDArray[np.float32]) -> Labelled:
        queries = [replace(q, embedding=tuple(map(float, v))) for q, v in zip(self.queries, vectors, strict=True)]
        return replace(self, queries=tuple(queries))


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") if path.suffix == ".gz" else path.open() as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"--data: {path}: {error.strerror or error}") from error


def _folds(path: Path, ids: Sequence[str]) -> dict[str, NDArray[np.str_]]:
    by_id = {row["id"]: row for row in _rows(path)}
    names = [name for name in next(iter(by_id.values())) if name != "id"]
    return {name: np.array([by_id[each][name] for each in ids]) for name in names}


def _pair(rows: list[dict[str, str]], queries: list[Query], folds: dict[str, NDArray[np.str_]]) -> Labelled:
    qualities = np.array([[float(row["weak"]), float(row["strong"])] for row in rows])
    return Labelled(tuple(queries), qualities, ("weak", "strong"), folds, np.empty((len(rows), 0)))


def mmlu(folder: Path) -> Labelled:
    rows = [row for row in _rows(folder / "routellm_mmlu.csv.gz") if row["contaminated"] == "0"]
    queries = [Query(re.sub(r"\s*Answer:\s*$", "", row["prompt"])) for row in rows]
    return _pair(rows, queries, _folds(folder / "splits/mmlu.csv", [row["id"] for row in rows]))


def gsm8k(folder: Path) -> Labelled:
    """With the weak model's answer, for a judge."""
    rows = [row for row in _rows(folder / "routellm_gsm8k.csv.gz") if row["contaminated"] == "0"]
    queries = [Query(row["prompt"], attempt=Attempt(row["weak_response"])) for row in rows]
    return _pair(rows, queries, _folds(folder / "splits/gsm8k.csv", [row["id"] for row in rows]))


def mt_bench(folder: Path) -> Labelled:
    """Judge's marks of 1 to 10 over both turns, as 0 to 1."""
    rows = [row for row in _rows(folder / "routellm_mtbench.csv.gz") if row["contaminated"] == "0"]
    marks = [[(float(row[f"{who}_1"]) + float(row[f"{who}_2"]) - 2) / 18 for who in ("weak", "strong")] for row in rows]
    queries = tuple(Query(row["turn1"]) for row in rows)
    return Labelled(queries, np.array(marks), ("weak", "strong"), {}, np.empty((len(rows), 0)))


def router_bench(folder: Path) -> Labelled:
    """Eleven models with their costs, cheapest first. Rows that miss a model's score are left out."""
    rows = _rows(folder / "routerbench_subset.csv.gz")
    models = [name.removeprefix("score:") for name in rows[0] if name.startswith("score:")]
    rows = [row for row in rows if all(row[f"{kind}:{model}"] for kind in ("score", "cost") for model in models)]
    qualities, costs = (
        np.array([[float(row[f"{kind}:{model}"]) for model in models] for row in rows]) for kind in ("score", "cost")
    )
    split = np.array([row["routerdc_split"] for row in rows])
    order = np.argsort(costs[split == "train"].mean(axis=0))
    queries = tuple(Query(row["question"]) for row in rows)
    names = tuple(models[i] for i in order)
    return Labelled(queries, qualities[:, order], names, {"split": split}, costs[:, order])


def without_near_copies(queries: Sequence[Query], train: Mask, test: Mask) -> Mask:
    """`train` without the rows that nearly equal a test row."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = TfidfVectorizer(sublinear_tf=True, dtype=np.float32).fit_transform([query.text for query in queries])
    left = train.copy()
    places = np.flatnonzero(train)
    for start in range(0, len(places), 500):
        part = places[start : start + 500]
        nearest = (vectors[part] @ vectors[test].T).max(axis=1).toarray().ravel()
        left[part[nearest >= NEAR]] = False
    return left
