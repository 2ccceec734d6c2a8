"""Progress bars for the long steps of a start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from gearshift.platform.weights.source import Progress as Report

BYTES_FROM = 1 << 20
"""A total that is larger than this counts bytes."""


class _Amount(DownloadColumn):
    def render(self, task):  # type: ignore[no-untyped-def]
        return super().render(task) if (task.total or 0) > BYTES_FROM else ""


@contextmanager
def bars(console: Console) -> Iterator[Report]:
    """Gives a function `report(stage, done, total)`; each stage is a line, with a bar once its end is known."""
    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"), BarColumn(), _Amount())
    with Progress(*columns, TimeElapsedColumn(), console=console) as shown:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=None if total == 1 else total)
            shown.update(tasks[stage], completed=done, total=total if done or total > 1 else None)

        yield report
