"""The engine's loop, synchronous and without threads: schedule, run, update. Everything else is around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gearshift.platform.engine.scheduler import Scheduler
from gearshift.platform.engine.sequence import Sequence, Step
from gearshift.platform.engine.text import Decodes, Detokenizer, StopStrings
from gearshift.platform.errors import GearshiftError, InternalError
from gearshift.platform.request import Delta, EngineStats, Usage


class Runner(Protocol):
    def run(self, step: Step) -> list[int]:
        """Computes the step; returns one sampled id for each chunk that samples, in their order."""
        ...


@dataclass(slots=True)
class _Stream:
    sequence: Sequence
    detokenizer: Detokenizer
    stops: StopStrings


Output = tuple[str, Delta | GearshiftError]
"""Request id, and what it gets: the next piece, or the error that ends it."""


class EngineCore:
    """Owns the streams of text; the scheduler owns their sequences. Used by one thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner, tokenizer: Decodes) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}
        self._steps = self._prompt_tokens = self._generation_tokens = self._aborted = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, sequence: Sequence) -> None:
        stops = StopStrings(sequence.sampling.stop)
        self._streams[sequence.id] = _Stream(sequence, Detokenizer(self._tokenizer), stops)
        self._prompt_tokens += len(sequence.prompt_ids)
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.scheduler.remove(stream.sequence)
            self._aborted += 1

    def step(self) -> list[Output]:
        """One iteration of the batch. A runner that raises fails the requests of this step and no others."""
        step = self.scheduler.schedule()
        self._steps += 1
        try:
            token_ids = self.runner.run(step)
        except Exception as error:
            return [(chunk.sequence.id, self._fail(chunk.sequence, error)) for chunk in step]
        tokens = self.scheduler.update(step, token_ids)
        self._generation_tokens += len(tokens)
        outputs: list[Output] = []
        for sequence, token_id, finish_reason in tokens:
            stream = self._streams[sequence.id]
            hidden = finish_reason == "stop"  # the end-of-text token has no text
            text = stream.stops.push("" if hidden else stream.detokenizer.push([token_id]))
            if finish_reason and not stream.stops.found:
                text += stream.stops.push(stream.detokenizer.flush())
                text += "" if stream.stops.found else stream.stops.flush()
            if stream.stops.found:
                finish_reason = "stop"
                self.scheduler.remove(sequence)
            if finish_reason:
                del self._streams[sequence.id]
                usage = Usage(len(sequence.prompt_ids), len(sequence.output_ids))
                outputs.append((sequence.id, Delta(text, finish_reason, usage)))
            elif text:
                outputs.append((sequence.id, Delta(text)))
        return outputs

    def stats(self) -> EngineStats:
        pool = self.scheduler.pool
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks_used=pool.num_used,
            kv_blocks_total=pool.num_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self.scheduler.num_preemptions,
            aborted=self._aborted,
        )

    def _fail(self, sequence: Sequence, cause: Exception) -> GearshiftError:
        self._streams.pop(sequence.id, None)
        self.scheduler.remove(sequence)
        if isinstance(cause, GearshiftError):
            return cause
        error = InternalError("The engine failed while it computed this request.")
        error.__cause__ = cause
        return error
