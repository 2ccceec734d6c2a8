"""A model behind another server, which here is a second Gearshift."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from gearshift.platform.config import Upstream
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.engine.upstream import UpstreamEngine, error_of
from gearshift.platform.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    GearshiftError,
    InvalidRequest,
    Overloaded,
    UpstreamError,
)
from gearshift.platform.request import Message, Request, SamplingParams, Usage

pytestmark = pytest.mark.anyio


def upstream(url: str, key: str = "gs-alice", **fields: Any) -> UpstreamEngine:
    config = Upstream(base_url=f"{url}/v1", model="cheap", api_key_env="THEIR_KEY", **fields)
    return UpstreamEngine(config, {"THEIR_KEY": key})


def ask(text: str = "one two three", **sampling: Any) -> Request:
    return Request("id", (Message("user", text),), SamplingParams(temperature=0, **sampling))


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_an_answer_is_streamed_with_its_usage(serve: Any) -> None:
    async with serve() as gateway:
        engine = upstream(gateway.url)
        deltas = [delta async for delta in engine.generate(ask(stop=("x",), seed=1, top_k=5))]
        await engine.close()
    assert "".join(delta.text for delta in deltas) == "one two three"
    assert len(deltas) > 2
    assert (deltas[-1].finish_reason, deltas[-1].usage) == ("stop", Usage(3, 3))
    assert engine.stats().aborted == 0


async def test_closing_the_answer_stops_the_server_behind(serve: Any) -> None:
    async with serve(small=EchoEngine(delay_s=0.01)) as gateway:
        engine = upstream(gateway.url)
        async with aclosing(engine.generate(ask(ignore_eos=True, max_tokens=5000))) as deltas:
            await anext(deltas)
        await until(lambda: gateway.engines["small"].stats().aborted == 1)
        assert engine.stats().running == 0
        await engine.close()


@pytest.mark.parametrize(
    ("key", "engine", "expected"),
    [
        ("gs-alice", EchoEngine(max_model_len=2), ContextLengthExceeded),
        ("gs-nobody", EchoEngine(), UpstreamError),
        ("gs-alice", EchoEngine(max_running=0), Overloaded),
        ("gs-alice", EchoEngine(fail_after=2), UpstreamError),
    ],
)
async def test_its_errors_become_ours(serve: Any, key: str, engine: EchoEngine, expected: type[GearshiftError]) -> None:
    async with serve(small=engine) as gateway:
        behind = upstream(gateway.url, key)
        with pytest.raises(expected) as caught:
            _ = [delta async for delta in behind.generate(ask())]
        await behind.close()
    assert key not in caught.value.message


async def test_a_server_that_is_away_or_too_slow(serve: Any) -> None:
    nobody = upstream("http://127.0.0.1:9")
    with pytest.raises(EngineUnavailable):
        _ = [delta async for delta in nobody.generate(ask())]
    await nobody.close()
    async with serve(small=EchoEngine(delay_s=2)) as gateway:
        slow = upstream(gateway.url, read_timeout_s=0.2)
        with pytest.raises(DeadlineExceeded):
            _ = [delta async for delta in slow.generate(ask())]
        await slow.close()


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, b'{"error": {"message": "bad", "param": "x", "code": "y"}}', InvalidRequest),
        (400, b"<html>", UpstreamError),
        (401, b'{"error": {"message": "their key is sk-123"}}', UpstreamError),
        (429, b"", Overloaded),
        (500, b'{"error": null}', UpstreamError),
    ],
)
def test_a_status_is_read_with_and_without_a_body(status: int, body: bytes, expected: type[GearshiftError]) -> None:
    error = error_of(status, body, {"retry-after": "7"})
    assert type(error) is expected
    assert "sk-123" not in error.message
    if isinstance(error, Overloaded):
        assert error.retry_after_s == 7
