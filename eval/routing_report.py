"""What a calibration does on held-out answers, for a person to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gearshift.eval.plot import pyplot
from gearshift.eval.routing import Curve, best_at, curves, summary
from gearshift.router.calibrate import Estimate, Measured, Rows
from gearshift.router.calibration import Calibration, Interval
from gearshift.router.metrics import Numbers

FLOORS = (1.0, 0.95, 0.9)


def markdown(rows: Rows, calibration: Calibration) -> str:
    told = summary(rows, calibration)
    found = curves(rows)
    weak, strong = rows.weak.mean(), rows.strong.mean()
    lines = [
        f"{len(rows.scores)} questions that the calibration has not seen. The cheap tier is right in {weak:.1%} at "
        f"{rows.cheap_costs.mean():.3g} CPU seconds, the expensive one in {strong:.1%} at {rows.expensive_costs.mean():.3g}.",
        "",
        "| | promised | on these questions |",
        "| --- | --- | --- |",
        f"| compute saved, cheap attempts counted | {_of(calibration.saving)} | {_of(told.saving)} |",
        f"| quality, over always expensive | {_of(calibration.quality)} | {_of(told.quality)} |",
        f"| … at least, with probability 0.95 | {calibration.quality_bound:.1%} | {told.quality_bound:.1%} |",
        f"| straight to the expensive tier | {calibration.expensive_share:.1%} | {told.expensive_share:.1%} |",
        f"| given up and asked again | {calibration.escalated_share:.1%} | {told.escalated_share:.1%} |",
        "",
        "Most that could be saved at a quality, over all thresholds of each way (chosen on these very questions, so a ceiling):",
        "",
        "| quality, over always expensive | " + " | ".join(curve.name for curve in found) + " |",
        "| --- " * (len(found) + 1) + "|",
    ]
    lines += [
        f"| {floor:.0%} | " + " | ".join(f"{best_at(curve, floor):.1%}" for curve in found) + " |" for floor in FLOORS
    ]
    return "\n".join(lines) + "\n"


def _of(value: Estimate | Interval) -> str:
    return f"{value.value:.1%} ({value.low:.1%} to {value.high:.1%})"


def draw_gaps(found: Mapping[str, tuple[Numbers, Numbers]], path: Path) -> None:
    """The gap recovered over the share of strong calls, a panel for each protocol, with a coin's line and the oracle's."""
    plt = pyplot()
    panels = list(dict.fromkeys(name.partition(": ")[0] for name in found))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.0), layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, (shares, gaps) in found.items():
            if name.startswith(f"{panel}: "):
                axis.plot(shares, 100 * gaps, label=name.partition(": ")[2])
        axis.plot([0, 100], [0, 100], linestyle=":", color="grey", label="random")
        axis.set(title=panel, xlabel="strong calls, %", ylabel="gap recovered, %")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw(found: Sequence[Curve], told: Measured | None, path: Path) -> None:
    """Quality over cost, both over always-expensive, with the calibrated point if there is one."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    for curve in found:
        axis.plot(
            100 * curve.costs, 100 * curve.qualities, label=curve.name, linestyle=":" if curve.name == "random" else "-"
        )
    if told is not None:
        _point(axis.errorbar, _inverse(told.saving), told.quality)
    axis.axhline(95, color="grey", linewidth=0.7)
    axis.set(xlabel="compute, % of always expensive", ylabel="quality, % of always expensive")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _inverse(saving: Estimate) -> Estimate:
    return Estimate(1 - saving.value, 1 - saving.high, 1 - saving.low)


def _point(errorbar: Callable[..., object], cost: Estimate, quality: Estimate) -> None:
    errorbar(
        100 * cost.value, 100 * quality.value,
        xerr=[[100 * (cost.value - cost.low)], [100 * (cost.high - cost.value)]],
        yerr=[[100 * (quality.value - quality.low)], [100 * (quality.high - quality.value)]],
        marker="o", capsize=3, color="black", label="as calibrated",
    )  # fmt: skip
