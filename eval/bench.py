"""The frame of every `gearshift bench`: repeat, report min, median and max, name the machine, hold the bars."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

REPORTED_VERSIONS = ("gearshift", "ray", "torch", "transformers", "fastapi", "uvicorn", "redis")


@dataclass(frozen=True, slots=True)
class Result:
    """One measured quantity: a value for each repeat."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, Any]:
        spread = {"min": min(self.values), "median": self.median, "max": max(self.values)}
        return {"name": self.name, "unit": self.unit, **spread, "values": list(self.values)}


@dataclass(frozen=True, slots=True)
class Bar:
    """What a result must reach. `max`: at most the limit; `min`: at least."""

    name: str
    value: float
    limit: float
    direction: Literal["max", "min"]

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.direction == "max" else self.value >= self.limit

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": float(self.value),  # numpy's numbers are none of JSON's
            "limit": float(self.limit),
            "direction": self.direction,
            "holds": bool(self.holds),
        }


@dataclass(slots=True)
class Report:
    bench: str
    results: list[Result] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(bar.holds for bar in self.bars)

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "machine": machine(),
            "results": [result.as_json() for result in self.results],
            "bars": [bar.as_json() for bar in self.bars],
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n")

    def show(self, console: Console) -> None:
        facts = machine()
        where = f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_1m']:.1f}"
        table = Table(title=f"gearshift bench {self.bench}", caption=f"{where}; {_versions_line(facts)}")
        for heading in ("", "min", "median", "max", "unit"):
            table.add_column(heading, justify="left" if heading in ("", "unit") else "right")
        for result in self.results:
            numbers = (min(result.values), result.median, max(result.values))
            table.add_row(result.name, *(f"{number:,.3g}" for number in numbers), result.unit)
        console.print(table)
        for bar in self.bars:
            sign = "≤" if bar.direction == "max" else "≥"
            word = "[green]holds[/]" if bar.holds else "[red]does not hold[/]"
            console.print(f"{word}  {bar.name}: {bar.value:.3g} {sign} {bar.limit:g}")


def collect(name: str, unit: str, values: Sequence[float]) -> Result:
    return Result(name, unit, tuple(values))


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1m": psutil.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found for name in REPORTED_VERSIONS if (found := _version(name))},
    }


def _versions_line(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in facts["versions"].items())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
