"""Randomized trees over the features of a query, and over what its vector says on a few axes: what scikit-learn grew,
evaluated in a page of numpy.

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

NO_AXES: Numbers = np.empty((0, 0))


@dataclass(frozen=True, slots=True)
class Trees(Forest):
    """values: [nodes, tiers], qualities. axes: [k, width of a vector]; a query's vector times each of them follows its features.
    Trees without axes look at no vector."""

    axes: Numbers

    kind = "trees"

    @property
    def embedded(self) -> int:
        return int(self.axes.shape[1])

    @classmethod
    def of(cls, forest: Any, axes: Numbers = NO_AXES) -> Trees:
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
            axes,
        )

    def check(self, width: int, outputs: int) -> None:
        """As `Forest.check`, of the axes too."""
        if self.axes.ndim != 2 or not np.isfinite(self.axes).all():
            raise ValueError("trees with axes that are none")
        Forest.check(self, width + len(self.axes), outputs)

    def qualities(self, queries: Sequence[Query]) -> Numbers:
        """[n, tiers]"""
        found: Numbers = self.leaves(inputs(queries, self.axes)).mean(axis=1)
        return found

    def why(self, query: Query) -> list[tuple[str, float]]:
        """What each feature adds to the gain of the most expensive tier over the cheapest on the way to the leaves."""
        rows, gains = inputs([query], self.axes), self.values[:, -1] - self.values[:, 0]
        places: NDArray[Any] = self.roots[np.newaxis, :]
        told = np.zeros(rows.shape[1])
        while (step := self.step(rows, places)) is not None:
            moved = self.feature[places[0]] != LEAF
            np.add.at(told, self.feature[places[0]][moved], (gains[step[0]] - gains[places[0]])[moved])
            places = step
        names = [*NAMES, *(f"axis {number} of the vector" for number in range(len(self.axes)))]
        return list(zip(names, (told / len(self.roots)).tolist(), strict=True))


def inputs(queries: Sequence[Query], axes: Numbers = NO_AXES) -> NDArray[np.float32]:
    """[n, features + axes], as the library compares them."""
    rows = np.array([features(query) for query in queries])
    if len(axes):
        rows = np.hstack([rows, np.array([query.embedding for query in queries]) @ axes.T])
    return rows.astype(np.float32)
