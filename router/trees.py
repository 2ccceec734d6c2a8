"""Randomized trees over the features of a query: what scikit-learn grew, evaluated in a page of numpy.

Extremely randomized trees (Geurts, Ernst & Wehenkel 2006, Machine Learning 63, section 2) with one leaf value a tier. On
subjects that they have never seen they rank better than words or embeddings do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gearshift.router.features import NAMES, Query, features

Numbers = NDArray[np.float64]
Places = NDArray[np.int32]
LEAF = -1


@dataclass(frozen=True, slots=True)
class Trees:
    """All nodes of all trees. feature: [nodes], LEAF in a leaf; a row goes left where its feature is at most the threshold;
    values: [nodes, tiers], qualities; roots: [trees]."""

    feature: Places
    threshold: Numbers
    left: Places
    right: Places
    values: Numbers
    roots: Places

    kind = "trees"
    embedded = 0

    @classmethod
    def of(cls, forest: Any) -> Trees:
        """From a fitted `ExtraTreesRegressor` with one output a tier."""
        trees = [each.tree_ for each in forest.estimators_]
        starts = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1]
        leaf = np.concatenate([tree.children_left < 0 for tree in trees])
        left, right = (
            np.concatenate([getattr(tree, side) + start for tree, start in zip(trees, starts, strict=True)])
            for side in ("children_left", "children_right")
        )
        return cls(
            np.where(leaf, LEAF, np.concatenate([tree.feature for tree in trees])).astype(np.int32),
            np.concatenate([tree.threshold for tree in trees]),
            np.where(leaf, 0, left).astype(np.int32),
            np.where(leaf, 0, right).astype(np.int32),
            np.concatenate([tree.value[:, :, 0] for tree in trees]),
            starts.astype(np.int32),
        )

    def check(self, tiers: int) -> None:
        """Raises `ValueError` for trees that are not: then a row would find no leaf, or wander for ever."""
        nodes = np.arange(len(self.feature))
        inner = self.feature != LEAF
        shapes = {array.shape for array in (self.feature, self.threshold, self.left, self.right)}
        if shapes != {nodes.shape} or self.values.shape != (len(nodes), tiers) or not len(self.roots):
            raise ValueError(f"trees of shapes that do not fit {tiers} tiers")
        if (self.feature >= len(NAMES)).any() or (self.feature < LEAF).any():
            raise ValueError(f"trees over other features than the {len(NAMES)} that this program counts; train it anew")
        for child in (self.left, self.right):
            if (child[inner] <= nodes[inner]).any() or (child >= len(nodes)).any():
                raise ValueError("trees with nodes that lead nowhere")
        if (self.roots < 0).any() or (self.roots >= len(nodes)).any() or not np.isfinite(self.values).all():
            raise ValueError("trees with roots or values that are none")

    def qualities(self, queries: Sequence[Query]) -> Numbers:
        """[n, tiers]"""
        rows = np.array([features(query) for query in queries], np.float32)  # as the library compares
        places: NDArray[Any] = np.broadcast_to(self.roots, (len(rows), len(self.roots)))
        while (step := self._step(rows, places)) is not None:
            places = step
        found: Numbers = self.values[places].mean(axis=1)
        return found

    def _step(self, rows: NDArray[np.float32], places: NDArray[Any]) -> NDArray[Any] | None:
        """The next node of each row in each tree, or None when all are in leaves."""
        feature = self.feature[places]
        leaf = feature == LEAF
        if leaf.all():
            return None
        values = np.take_along_axis(rows, np.where(leaf, 0, feature), axis=1)
        following = np.where(values <= self.threshold[places], self.left[places], self.right[places])
        return np.where(leaf, places, following)

    def why(self, query: Query) -> list[tuple[str, float]]:
        """What each feature adds to the gain of the most expensive tier over the cheapest on the way to the leaves."""
        rows, gains = np.array([features(query)], np.float32), self.values[:, -1] - self.values[:, 0]
        places: NDArray[Any] = self.roots[np.newaxis, :]
        told = np.zeros(len(NAMES))
        while (step := self._step(rows, places)) is not None:
            moved = self.feature[places[0]] != LEAF
            np.add.at(told, self.feature[places[0]][moved], (gains[step[0]] - gains[places[0]])[moved])
            places = step
        return list(zip(NAMES, (told / len(self.roots)).tolist(), strict=True))
