"""What every engine is, whether it runs here, in another process or behind another company's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, runtime_checkable

from gearshift.platform.request import Delta, EngineStats, Request


class Engine(Protocol):
    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Yields the answer as it grows; the last Delta has a finish reason and the usage.

        Closing the generator aborts the work and frees what it held. Raises `ContextLengthExceeded`, `Overloaded`,
        `EngineUnavailable` or `UpstreamError`, before the first Delta where it can.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Ends the engine; requests still running fail with `ShuttingDown`."""
        ...


@runtime_checkable
class Starting(Protocol):
    """An engine that may have to be started for a request, which waits meanwhile."""

    @property
    def stage(self) -> str:
        """What it is at, for people; empty when it answers, or when nothing waits for it."""
        ...
