"""The picture that lets an operator choose how many streams to run at once for a latency they can promise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gearshift.eval.bench import Report, Result
from gearshift.platform.errors import ConfigError

SERIES = re.compile(r"(?P<who>.+), (?P<streams>\d+) streams?: (?P<what>.+)")
PANELS = {
    ("output", "tokens/CPU-s"): "output tokens per CPU-second",
    ("inter-token p95", "ms"): "inter-token latency p95, ms",
    ("time to first token p50", "ms"): "time to first token p50, ms",
}


def pyplot() -> Any:
    """Raises `ConfigError` when there is nothing to draw with."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib; pip install 'gearshift[bench]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as found

    return found


def draw(report: Report, path: Path) -> None:
    """Raises `ConfigError` when there is nothing to draw or nothing to draw with."""
    found = {panel: _curves(report, panel) for panel in PANELS}
    if not any(found.values()):
        raise ConfigError("--plot: the report has no throughput over streams; run the throughput part")
    plt = pyplot()
    names = list(dict.fromkeys(who for curves in found.values() for who in curves))
    colours = {who: f"C{number}" for number, who in enumerate(names)}  # the same in every panel
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 3.8), layout="constrained")
    for axis, (panel, title) in zip(axes, PANELS.items(), strict=True):
        for who, results in found[panel].items():
            _curve(axis.errorbar, who, results, colours[who])
        axis.set(title=title, xlabel="streams", xscale="log")
        ticks = sorted({streams for results in found[panel].values() for streams in results})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _curves(report: Report, panel: tuple[str, str]) -> dict[str, dict[int, Result]]:
    curves: dict[str, dict[int, Result]] = {}
    for result in report.results:
        match = SERIES.fullmatch(result.name)
        if match and (match["what"], result.unit) == panel:
            curves.setdefault(match["who"], {})[int(match["streams"])] = result
    return curves


def _curve(errorbar: Callable[..., object], who: str, results: dict[int, Result], colour: str) -> None:
    streams = sorted(results)
    medians = [results[number].median for number in streams]
    below = [results[number].median - min(results[number].values) for number in streams]
    above = [max(results[number].values) - results[number].median for number in streams]
    errorbar(streams, medians, yerr=[below, above], marker="o", markersize=4, capsize=3, label=who, color=colour)
