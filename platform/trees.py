"""Decision trees that a library grew, as arrays of numbers: walked in a page of numpy, so that who asks them needs no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Places = NDArray[np.int32]
LEAF = -1


@dataclass(frozen=True, slots=True)
class Forest:
    """All nodes of all trees. feature: [nodes], LEAF in a leaf; a row goes left where its feature is at most the threshold;
    values: [nodes, outputs]; roots: [trees]."""

    feature: Places
    threshold: Numbers
    left: Places
    right: Places
    values: Numbers
    roots: Places

    def check(self, width: int, outputs: int) -> None:
        """Raises `ValueError` for trees that are not: then a row would find no leaf, or wander for ever. width: of a row."""
        nodes = np.arange(len(self.feature))
        inner = self.feature != LEAF
        shapes = {array.shape for array in (self.feature, self.threshold, self.left, self.right)}
        if shapes != {nodes.shape} or self.values.shape != (len(nodes), outputs) or not len(self.roots):
            raise ValueError(f"trees of shapes that do not fit {outputs} outputs")
        if (self.feature >= width).any() or (self.feature < LEAF).any():
            raise ValueError(f"trees over other features than the {width} that this program counts; train it anew")
        for child in (self.left, self.right):
            if (child[inner] <= nodes[inner]).any() or (child >= len(nodes)).any():
                raise ValueError("trees with nodes that lead nowhere")
        if (self.roots < 0).any() or (self.roots >= len(nodes)).any() or not np.isfinite(self.values).all():
            raise ValueError("trees with roots or values that are none")

    def step(self, rows: NDArray[Any], places: NDArray[Any]) -> NDArray[Any] | None:
        """The next node of each row in each tree, or None when all are in leaves."""
        feature = self.feature[places]
        leaf = feature == LEAF
        if leaf.all():
            return None
        values = np.take_along_axis(rows, np.where(leaf, 0, feature), axis=1)
        following = np.where(values <= self.threshold[places], self.left[places], self.right[places])
        return np.where(leaf, places, following)

    def leaves(self, rows: NDArray[Any]) -> Numbers:
        """[n, width] to the values of the leaves, [n, trees, outputs]."""
        places: NDArray[Any] = np.broadcast_to(self.roots, (len(rows), len(self.roots)))
        while (step := self.step(rows, places)) is not None:
            places = step
        found: Numbers = self.values[places]
        return found
