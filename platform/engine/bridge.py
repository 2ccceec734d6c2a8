"""AsyncEngine: one thread steps the core, many coroutines wait for their part of each step."""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from gearshift.platform.engine.core import EngineCore, Output
from gearshift.platform.engine.inbox import Inbox, read
from gearshift.platform.engine.sequence import Sequence
from gearshift.platform.errors import ContextLengthExceeded, EngineUnavailable, GearshiftError, Overloaded, ShuttingDown
from gearshift.platform.request import Delta, EngineStats, Message, Request

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Prompts:
    """What turns messages into ids, and the ids that end an answer."""

    encode: Callable[[tuple[Message, ...]], list[int]]
    eos_ids: frozenset[int]


class AsyncEngine:
    """The Engine protocol over an `EngineCore`. Owns the thread and the admission: at most `max_num_seqs` running and
    `max_queued_requests` waiting, the next one is `Overloaded`."""

    def __init__(self, core: EngineCore, prompts: Prompts, max_model_len: int, max_queued_requests: int) -> None:
        self._core = core
        self._prompts = prompts
        self._max_len = min(max_model_len, core.scheduler.pool.capacity)
        self._max_admitted = core.scheduler.max_num_seqs + max_queued_requests
        self._admitted = 0
        self._streams: dict[str, Inbox] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stats = core.stats()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        if self._admitted >= self._max_admitted:
            raise Overloaded("The model's queue is full; try again later.", retry_after_s=RETRY_AFTER_S)
        self._admitted += 1
        try:
            ids = await asyncio.to_thread(self._prompts.encode, request.messages)
            sequence = self._sequence(request, ids)
            self._start()  # only now: the engine may have ended meanwhile, and nobody would answer
            async with aclosing(self._stream(sequence)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._admitted -= 1

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def healthy(self) -> bool:
        """False when the thread has ended by itself: nothing will be computed any more."""
        return self._closing or self._loop is None or self._thread.is_alive()

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._commands.put(None)
        if self._loop is not None:
            await asyncio.to_thread(self._thread.join)
        self._fail_all(ShuttingDown("The model is shutting down."))

    def _start(self) -> None:
        if self._closing:
            raise ShuttingDown("The model is shutting down.")
        if not self.healthy:
            raise EngineUnavailable("The model's engine has stopped.")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()

    def _sequence(self, request: Request, ids: list[int]) -> Sequence:
        sampling, room = request.sampling, self._max_len - len(ids)
        wished = None if sampling.fit_context else sampling.max_tokens
        if room < 1 or (wished is not None and wished > room):
            wanted = f" and {wished} for the answer" if wished else ""
            raise ContextLengthExceeded(
                f"The context holds {self._max_len} tokens, but the request needs {len(ids)} for the messages{wanted}. "
                "Shorten the messages or ask for fewer tokens.",
                param="messages",
            )
        return Sequence(
            id=request.id,
            prompt_ids=ids,
            sampling=sampling,
            max_tokens=min(room, sampling.max_tokens or room),
            stop_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else self._prompts.eos_ids),
            seed=random.getrandbits(63) if sampling.seed is None else sampling.seed,
        )

    async def _stream(self, sequence: Sequence) -> AsyncGenerator[Delta, None]:
        inbox: Inbox = asyncio.Queue()
        self._streams[sequence.id] = inbox
        self._commands.put(lambda: self._core.add(sequence))
        try:
            async for delta in read(inbox):
                yield delta
        finally:
            if self._streams.pop(sequence.id, None) is not None:
                self._commands.put(lambda: self._core.abort(sequence.id))

    def _run(self) -> None:
        """The engine thread. Commands are carried out between steps, so an abort never meets a running step."""
        assert self._loop is not None
        try:
            while self._obey():
                outputs = self._core.step() if self._core.has_work else []
                self._loop.call_soon_threadsafe(self._deliver, outputs, self._core.stats())
        except BaseException as error:
            log.exception("the engine thread ended")
            unavailable = EngineUnavailable("The model's engine has stopped.")
            unavailable.__cause__ = error
            self._loop.call_soon_threadsafe(self._fail_all, unavailable)

    def _obey(self) -> bool:
        """Waits for a command when there is nothing to compute. False when it is time to end."""
        wait = not self._core.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _deliver(self, outputs: list[Output], stats: EngineStats) -> None:
        self._stats = stats
        for request_id, item in outputs:
            if isinstance(item, GearshiftError):
                log.error("request %s failed in the engine", request_id, exc_info=item.__cause__)
                inbox = self._streams.pop(request_id, None)
            elif item.finish_reason:
                inbox = self._streams.pop(request_id, None)
            else:
                inbox = self._streams.get(request_id)
            if inbox is not None:
                inbox.put_nowait(item)

    def _fail_all(self, error: GearshiftError) -> None:
        streams, self._streams = self._streams, {}
        for inbox in streams.values():
            inbox.put_nowait(error)
