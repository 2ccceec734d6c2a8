"""How an experiment's intervals narrowed: one panel a measure."""

from __future__ import annotations

import math
from pathlib import Path

from gearshift.eval.plot import pyplot
from gearshift.eval.scores import MEASURES
from gearshift.platform.errors import ConfigError
from gearshift.platform.request import JsonObject

COLUMNS = 3
WIDEST_RATIO = 4.0


def draw(name: str, found: JsonObject, path: Path) -> None:
    """`found`: of the admin API. Raises `ConfigError` when there is nothing to draw or nothing to draw with."""
    track = [tuple(point) for point in found["track"]]
    measures = list(dict.fromkeys(point[2] for point in track))
    if not measures:
        raise ConfigError(f"--plot: {name} has nothing to draw yet")
    plt = pyplot()
    rows = math.ceil(len(measures) / COLUMNS)
    columns = min(COLUMNS, len(measures))
    size = (4.2 * columns, 3.2 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(measures) :]:
        axis.set_visible(False)
    for axis, measure in zip(axes.flat, measures, strict=False):
        ratio = MEASURES[measure].kind == "p95"
        for number, arm in enumerate(arm for arm in found["arms"] if arm != found["baseline"]):
            points = [point for point in track if point[2] == measure and point[3] == arm]
            counts = [point[1] for point in points]
            values = [point[4] / point[5] if ratio and point[5] else point[4] - point[5] for point in points]
            axis.plot(counts, values, color=f"C{number}", label=arm)
            low, high = ([point[place] for point in points] for place in (6, 7))
            axis.fill_between(counts, low, high, color=f"C{number}", alpha=0.2, step="post")
        axis.axhline(1 if ratio else 0, color="black", linewidth=0.8)
        axis.set(title=measure, xlabel="exposures", xscale="log")
        axis.set_ylabel("ratio to the baseline" if ratio else "difference from the baseline")
        if ratio:  # an interval that is still open at an end fills the panel
            axis.set(yscale="log", ylim=(1 / WIDEST_RATIO, WIDEST_RATIO))
            axis.set_yticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
            axis.set_yticks([], minor=True)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)
