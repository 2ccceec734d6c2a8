"""The engine's loop, synchronous and without threads: schedule, run, update. Everything else is around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from gearshift.platform.engine.scheduler import Scheduler
from gearshift.platform.engine.sequence import Sampled, Sequence, Step, Token
from gearshift.platform.errors import GearshiftError, InternalError
from gearshift.platform.request import EngineStats


class Runner(Protocol):
    def run(self, step: Step) -> list[Sampled]:
        """Computes the step; returns one token for each chunk that samples, in their order."""
        ...

    def close(self) -> None: ...


class EngineLost(Exception):
    """Nothing can be computed here any more, by any request."""


class Failure(NamedTuple):
    sequence: Sequence
    error: GearshiftError


class EngineCore:
    """Counts what the scheduler and the runner do. Used by one thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._clock = clock
        self._steps = self._prompt_tokens = self._generation_tokens = self._aborted = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, sequence: Sequence) -> None:
        self._prompt_tokens += len(sequence.prompt_ids)
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Frees all it held. Between steps, so it never meets an update."""
        self.scheduler.remove(sequence)
        self._aborted += 1

    def step(self) -> list[Token | Failure]:
        """One iteration of the batch. A runner that raises fails the requests of this step and no others, unless it raises
        `EngineLost`, which is passed on."""
        begun = self._clock()
        step = self.scheduler.schedule()
        self._steps += 1
        try:
            sampled = self.runner.run(step) if step else []
        except EngineLost:
            raise
        except Exception as error:
            return [Failure(chunk.sequence, self._fail(chunk.sequence, error)) for chunk in step]
        tokens = self.scheduler.update(step, sampled, self._clock() - begun)
        self._generation_tokens += len(tokens)
        return list(tokens)

    def close(self) -> None:
        """Lets go of what computes, where there is more of it than this process."""
        self.runner.close()

    def stats(self) -> EngineStats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            kv_blocks_used=pool.num_used,
            kv_blocks_total=pool.num_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=scheduler.num_preemptions,
            aborted=self._aborted,
            prefix_queries=pool.queries,
            prefix_hits=pool.hits,
            queued_tokens=scheduler.queued_tokens,
            kv_tokens_total=pool.capacity,
            dispersion=scheduler.dispersion,
        )

    def _fail(self, sequence: Sequence, cause: Exception) -> GearshiftError:
        self.scheduler.remove(sequence)
        if isinstance(cause, GearshiftError):
            return cause
        error = InternalError("The engine failed while it computed this request.")
        error.__cause__ = cause
        return error
