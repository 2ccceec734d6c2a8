"""Where requests wait for a model that has no replica, until it has one."""

from __future__ import annotations

import asyncio
import time

from gearshift.platform.config import Autoscaling
from gearshift.platform.errors import EngineUnavailable, Overloaded

RETRY_AFTER_S = 10.0
"""When nothing is known of how long the model takes."""


class Hold:
    """One for all requests of a model in this process. That somebody waits is told to who starts replicas by `count`, so that
    many waiters are one wake-up."""

    def __init__(self, model: str, settings: Autoscaling) -> None:
        self._model = model
        self.settings = settings
        self._up = asyncio.Event()
        self._starting = ""
        self._since = 0.0
        self._took_s = RETRY_AFTER_S
        self.count = 0

    @property
    def stage(self) -> str:
        """What those who wait are told."""
        waited = f"{time.monotonic() - self._since:.0f} s" if self.count else "0 s"
        return f"{self._model} is starting: {self._starting or 'waiting for a replica'} ({waited})"

    def told(self, ready: bool, starting: str) -> None:
        """Called again and again: whether there is a replica, and what the next one is at."""
        self._starting = starting
        if not ready:
            self._up.clear()
            return
        if self.count and not self._up.is_set():
            self._took_s = time.monotonic() - self._since
        self._up.set()

    async def wait(self) -> None:
        """Raises `Overloaded` when too many wait already, and `EngineUnavailable` when it takes too long."""
        settings = self.settings
        if self.count >= settings.max_held:
            raise Overloaded(
                f"{self._model} is starting, and {self.count} requests wait for it already.",
                retry_after_s=self._left_s(),
            )
        if not self.count:
            self._since = time.monotonic()
            self._up.clear()
        self.count += 1
        try:
            async with asyncio.timeout(settings.max_hold_s):
                await self._up.wait()
        except TimeoutError as error:
            raise EngineUnavailable(
                f"{self._model} did not start within {settings.max_hold_s:g} s.", retry_after_s=self._left_s()
            ) from error
        finally:
            self.count -= 1

    def _left_s(self) -> float:
        """By how long it took the last time."""
        return max(1.0, self._took_s - (time.monotonic() - self._since))
