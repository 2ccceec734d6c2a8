"""EchoEngine: answers with the words of the last user message. A part of the product, for tests, trials and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import cycle, islice

from gearshift.platform.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    GearshiftError,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
)
from gearshift.platform.request import Delta, EngineStats, Request, Usage


class EchoEngine:
    """A word is a token, and `delay_s` is the length of a step, which all answers share.

    With `ignore_eos` the words repeat until `max_tokens`.

    `fail_after` makes every answer break after so many words, with `failure`. `logprobs` are told in turn as those of the
    words, for requests that ask for `certainty`.
    """

    def __init__(
        self,
        delay_s: float = 0.0,
        max_running: int = 256,
        max_model_len: int = 8192,
        fail_after: int | None = None,
        failure: GearshiftError | None = None,
        logprobs: Sequence[float] = (),
    ) -> None:
        self._delay_s = delay_s
        self._max_running = max_running
        self._max_len = max_model_len
        self._fail_after = fail_after
        self._failure = failure or EngineUnavailable("The replica that worked on the request is gone.")
        self._logprobs = logprobs
        self._closed = False
        self._step: asyncio.Event | None = None
        self._running = self._steps = self._prompt_tokens = self._generation_tokens = self._aborted = 0

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        if self._closed:
            raise ShuttingDown("The model is shutting down.")
        if self._running >= self._max_running:
            raise Overloaded("The model's queue is full; try again later.", retry_after_s=1.0)
        if request.sampling.logprobs is not None or isinstance(request.prompt, tuple):
            raise InvalidRequest("A model that echoes knows no tokens and no probabilities.")
        prompt = sum(len(text.split()) for text in _texts(request))
        if prompt >= self._max_len:
            raise ContextLengthExceeded(
                f"The context holds {self._max_len} tokens, the messages have {prompt}.", "messages"
            )
        self._running += 1
        self._prompt_tokens += prompt
        finished = False
        try:
            count = 0
            if request.sampling.echo and request.prompt is not None:
                yield Delta(request.prompt, tokens=0, echo=True)
            words = _words(request)
            total = len(words) if request.sampling.max_tokens is None else request.sampling.max_tokens
            for word in islice(cycle(words) if request.sampling.ignore_eos else iter(words), total):
                await self._next_step()
                if count == self._fail_after:
                    raise self._failure
                told = self._logprobs[count % len(self._logprobs)] if self._logprobs else 0.0
                logprobs, entropies = ((told,), (-told,)) if request.sampling.certainty else ((), ())
                text, count = word if count == 0 else f" {word}", count + 1
                if count <= len(request.resume):
                    continue
                yield Delta(text, logprobs=logprobs, entropies=entropies, ids=(count,))
                self._steps += 1
                self._generation_tokens += 1
            ended = "stop" if count == len(words) and not request.sampling.ignore_eos else "length"
            finished = True
            yield Delta("", "stop" if ended == "stop" else "length", Usage(prompt, count))
        finally:
            self._running -= 1
            self._aborted += not finished

    async def _next_step(self) -> None:
        """All answers move on together, as they do in an engine that computes one batch a step."""
        if not self._delay_s:
            await asyncio.sleep(0)
            return
        if self._step is None or self._step.is_set():
            self._step = asyncio.Event()
            asyncio.get_running_loop().call_later(self._delay_s, self._step.set)
        await self._step.wait()

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._running,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            aborted=self._aborted,
        )

    async def close(self) -> None:
        self._closed = True


def _words(request: Request) -> list[str]:
    texts = _texts(request, "user")
    return (texts[-1] if texts else "").split() or ["…"]


def _texts(request: Request, role: str = "") -> list[str]:
    if isinstance(request.prompt, str):
        return [request.prompt]
    return [message.content for message in request.messages if role in ("", message.role)]
