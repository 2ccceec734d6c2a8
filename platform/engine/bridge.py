"""AsyncEngine: one thread steps the core, the event loop makes text of its tokens beside the next step, and many
coroutines wait for their part."""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from gearshift.platform.engine.banned import Banned
from gearshift.platform.engine.core import EngineCore, Failure
from gearshift.platform.engine.inbox import Inbox, read
from gearshift.platform.engine.prefixes import Prefixes
from gearshift.platform.engine.sequence import Sequence, Token
from gearshift.platform.engine.text import AnswerText, Decodes
from gearshift.platform.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    GearshiftError,
    InternalError,
    Overloaded,
    ShuttingDown,
)
from gearshift.platform.request import Delta, EngineStats, Request

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Prompts:
    """What turns messages into ids and ids into text, and the ids that end an answer."""

    encode: Callable[[Request], list[int]]
    eos_ids: frozenset[int]
    tokenizer: Decodes


@dataclass(slots=True)
class _Stream:
    inbox: Inbox
    text: AnswerText


class AsyncEngine:
    """The Engine protocol over an `EngineCore`. Owns the thread and the admission: at most `max_num_seqs` running and
    `max_queued_requests` waiting, the next one is `Overloaded`."""

    def __init__(
        self,
        core: EngineCore,
        prompts: Prompts,
        max_model_len: int,
        max_queued_requests: int,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._core = core
        self.prefixes = prefixes
        self._prompts = prompts
        self._max_len = min(max_model_len, core.scheduler.pool.capacity)
        self._max_admitted = core.scheduler.max_num_seqs + max_queued_requests
        self._admitted = 0
        self._streams: dict[str, _Stream] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stats = core.stats()
        self._closing = self._lost = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        if self._admitted >= self._max_admitted:
            raise Overloaded("The model's queue is full; try again later.", retry_after_s=RETRY_AFTER_S)
        self._admitted += 1
        try:
            ids = await asyncio.to_thread(self._prompts.encode, request)
            sequence = self._sequence(request, ids)
            self._start()  # only now: the engine may have ended meanwhile, and nobody would answer
            if self.prefixes is not None:
                await self.prefixes.fetch(sequence, self._on_engine)
                self._start()
            async with aclosing(self._stream(sequence, request.sent)) as deltas:
                async for delta in deltas:
                    yield delta
            if self.prefixes is not None:
                self.prefixes.asked_again(sequence, self._on_engine)
        finally:
            self._admitted -= 1

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def healthy(self) -> bool:
        """False when the thread has ended by itself, or something it needs: nothing will be computed any more."""
        return self._closing or not (self._lost or (self._loop is not None and not self._thread.is_alive()))

    def lose(self, why: str) -> None:
        """Something that the engine needs is gone. Everybody who waits is told at once, even while the thread still hangs in a
        step."""
        self._lost = True
        log.error("the engine is lost: %s", why)
        self._fail_all(EngineUnavailable("The model's engine has stopped."))

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._commands.put(None)
        if not self._lost:  # else the thread may hang in a step, and the others are to be ended from outside
            if self._loop is not None:
                await asyncio.to_thread(self._thread.join)
            self._core.close()
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
            what = "messages" if request.prompt is None else "prompt"
            raise ContextLengthExceeded(
                f"The context holds {self._max_len} tokens, but the request needs {len(ids)} for the {what}{wanted}. "
                f"Shorten the {what} or ask for fewer tokens.",
                param=what,
            )
        return Sequence(
            id=request.id,
            prompt_ids=ids,
            prompt_text=request.prompt if isinstance(request.prompt, str) else None,
            sampling=sampling,
            max_tokens=min(room, sampling.max_tokens or room),
            stop_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else self._prompts.eos_ids),
            tenant=request.tenant,
            service=request.service,
            salt=f"{request.tenant}\0{request.cache_salt}".encode(),
            seed=next(seed for seed in (sampling.seed, request.seed, random.getrandbits(63)) if seed is not None),
            output_ids=list(request.resume),
            banned=Banned(self._prompts.tokenizer, sampling.banned) if sampling.banned else None,
        )

    async def _stream(self, sequence: Sequence, sent: int) -> AsyncGenerator[Delta, None]:
        inbox: Inbox = asyncio.Queue()
        text = AnswerText(self._prompts.tokenizer, sequence)
        if sequence.output_ids:
            text.resume(sequence.output_ids, sent)
        self._streams[sequence.id] = _Stream(inbox, text)
        self._commands.put(lambda: self._core.add(sequence))
        try:
            async for delta in read(inbox):
                yield delta
        finally:
            if self._streams.pop(sequence.id, None) is not None:
                self._commands.put(lambda: self._core.abort(sequence))

    async def _on_engine(self, work: Callable[[], Any]) -> Any:
        """Between two steps, in the engine's thread. Never comes back where the engine has ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._commands.put(run)
        return await future

    def _run(self) -> None:
        """The engine thread. Commands are carried out between steps, so an abort never meets a running step."""
        assert self._loop is not None
        try:
            while self._obey():
                results = self._core.step() if self._core.has_work else []
                self._loop.call_soon_threadsafe(self._deliver, results, self._core.stats())
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

    def _deliver(self, results: list[Token | Failure], stats: EngineStats) -> None:
        """What a step gave, in the event loop, while the next step runs."""
        self._stats = stats
        for result in results:
            sequence, stream = result.sequence, self._streams.get(result.sequence.id)
            if isinstance(result, Failure):
                log.error("request %s failed in the engine", sequence.id, exc_info=result.error.__cause__)
                self._end(sequence, stream, result.error)
            elif stream is not None:
                self._push(sequence, stream, result)

    def _push(self, sequence: Sequence, stream: _Stream, token: Token) -> None:
        """The token's text to who asked; when the text ends the answer before the engine does, the engine is told."""
        try:
            if sequence.sampling.echo and len(sequence.output_ids) == 1:
                stream.inbox.put_nowait(stream.text.prompt())
            delta = stream.text.push(token.sampled, token.finish_reason)
        except Exception as error:
            log.exception("no text could be made for request %s", sequence.id)
            failed = InternalError("The engine failed while it wrote this answer.")
            failed.__cause__ = error
            self._commands.put(lambda: self._core.abort(sequence))
            return self._end(sequence, stream, failed)
        if delta is None:
            return None
        if not delta.finish_reason:
            return stream.inbox.put_nowait(delta)
        if not token.finish_reason:
            self._commands.put(lambda: self._core.scheduler.remove(sequence))
        return self._end(sequence, stream, delta)

    def _end(self, sequence: Sequence, stream: _Stream | None, last: Delta | GearshiftError) -> None:
        self._streams.pop(sequence.id, None)
        if stream is not None:
            stream.inbox.put_nowait(last)

    def _fail_all(self, error: GearshiftError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.inbox.put_nowait(error)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # nobody waits any more
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
