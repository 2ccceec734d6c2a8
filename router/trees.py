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

from gearshift.platform.trees import LEAF, Forest, Numbers
from gearshift.router.features import NAMES, Query, features


@dataclass(frozen=True, slots=True)
class Trees(Forest):
    """values: [nodes, tiers], qualities."""

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

    def qualities(self, queries: Sequence[Query]) -> Numbers:
        """[n, tiers]"""
        rows = np.array([features(query) for query in queries], np.float32)  # as the library compares
        found: Numbers = self.leaves(rows).mean(axis=1)
        return found

    def why(self, query: Query) -> list[tuple[str, float]]:
        """What each feature adds to the gain of the most expensive tier over the cheapest on the way to the leaves."""
        rows, gains = np.array([features(query)], np.float32), self.values[:, -1] - self.values[:, 0]
        places: NDArray[Any] = self.roots[np.newaxis, :]
        told = np.zeros(len(NAMES))
        while (step := self.step(rows, places)) is not None:
            moved = self.feature[places[0]] != LEAF
            np.add.at(told, self.feature[places[0]][moved], (gains[step[0]] - gains[places[0]])[moved])
            places = step
        return list(zip(NAMES, (told / len(self.roots)).tolist(), strict=True))
