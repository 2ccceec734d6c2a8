"""Threads beside the engine's own, for kernels that let go of the interpreter while they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Part = TypeVar("Part")


class Workers:
    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "kernel") if threads > 1 else None

    def run(self, work: Callable[[Part], None], parts: Sequence[Part]) -> None:
        """Returns when all parts are done, the first of them by the caller's own thread."""
        waiting = [self._others.submit(work, part) for part in parts[1:]] if self._others else []
        for part in parts if self._others is None else parts[:1]:
            work(part)
        for other in waiting:
            other.result()
