"""Requests for a model that has no replica: held until it has one, told so meanwhile, and never more than there is room for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gearshift.deployments import gateway as gateway_module
from gearshift.deployments.engine_server import EngineServer
from gearshift.deployments.hold import Hold
from gearshift.deployments.remote import RemoteEngine
from gearshift.platform.config import Autoscaling
from gearshift.platform.engine.echo import EchoEngine

pytestmark = pytest.mark.anyio


def cold(**words: Any) -> RemoteEngine:
    """An engine that sleeps."""
    settings = Autoscaling(min_replicas=0, max_replicas=1, **words)
    return RemoteEngine("large", hold=Hold("large", settings))


@asynccontextmanager
async def woken(engine: RemoteEngine, path: Path) -> AsyncIterator[EngineServer]:
    server = EngineServer(EchoEngine(), lambda _, deltas: deltas)
    await server.start(path)
    await engine.refresh([str(path)])
    yield server
    await server.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def ask(client: openai.AsyncOpenAI, text: str = "one two") -> Any:
    return client.chat.completions.create(model="large-v1", messages=[{"role": "user", "content": text}])


async def test_many_wait_for_one_start_and_are_all_answered(serve: Any, tmp_path: Path) -> None:
    engine = cold(max_held=3)
    async with serve(large=engine) as gateway, gateway.client() as client:
        waiting = [asyncio.create_task(ask(client, f"one {n}")) for n in range(3)]
        await until(lambda: engine.held == 3)
        with pytest.raises(openai.RateLimitError, match="3 requests wait for it already") as full:
            await ask(client)
        assert int(full.value.response.headers["retry-after"]) >= 1
        async with woken(engine, tmp_path / "e.sock"):
            answers = await asyncio.gather(*waiting)
            assert [answer.choices[0].message.content for answer in answers] == ["one 0", "one 1", "one 2"]
            assert engine.held == 0
            assert (await ask(client)).choices[0].message.content == "one two"
        await engine.close()


async def test_a_stream_that_waits_is_told_why_and_then_is_a_stream_as_always(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "HEARTBEAT_S", 0.02)
    engine = cold()
    async with serve(large=engine) as gateway, gateway.client() as client:
        told: list[str] = []
        body = {"model": "large-v1", "stream": True, "messages": [{"role": "user", "content": "one two"}]}
        headers = {"authorization": f"Bearer {client.api_key}"}

        async def raw() -> None:
            async with (
                httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30) as http,
                http.stream("POST", "/v1/chat/completions", json=body) as answer,
            ):
                assert answer.headers["x-gearshift-release"] == "large-v1"
                async for line in answer.aiter_lines():
                    told.append(line)  # noqa: PERF401 -- looked at while it grows

        reading = asyncio.create_task(raw())
        other = body | {"messages": [{"role": "user", "content": "one two three"}]}
        chunks = asyncio.create_task(collect(client, other))
        await until(lambda: told and engine.held == 2)
        await engine.refresh([], "loading weights")
        await until(lambda: told[-2].startswith(": large is starting: loading weights"))
        async with woken(engine, tmp_path / "e.sock"):
            await reading
            assert await chunks == "one two three"  # the official client knows what comments are
        assert told[0].startswith(": large is starting: waiting for a replica")
        data = [line.removeprefix("data: ") for line in told if line.startswith("data: ")]
        assert "".join(json.loads(each)["choices"][0]["delta"].get("content") or "" for each in data[:-1]) == "one two"
        assert data[-1] == "[DONE]"
        await engine.close()


async def collect(client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
    stream = await client.chat.completions.create(**body)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_one_that_does_not_start_in_time_is_an_error_in_the_form_of_the_answer(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "HEARTBEAT_S", 0.02)
    engine = cold(max_hold_s=0.2)
    async with serve(large=engine) as gateway, gateway.client() as client:
        with pytest.raises(openai.InternalServerError, match=r"did not start within 0\.2 s") as refused:
            await ask(client)
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1
        body = {"model": "large-v1", "stream": True, "messages": [{"role": "user", "content": "one two"}]}
        with pytest.raises(openai.APIError, match="did not start within"):  # an event: the status line is sent
            await collect(client, body)
        assert (engine.held, gateway.pipeline.inflight) == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_waits_no_longer(serve: Any, stream: bool) -> None:
    engine = cold()
    async with serve(large=engine) as gateway, gateway.client() as client:
        body = {"model": "large-v1", "stream": stream, "messages": [{"role": "user", "content": "one two"}]}
        waiting = asyncio.create_task(client.chat.completions.create(**body))
        await until(lambda: engine.held == 1)
        waiting.cancel()
        await until(lambda: engine.held == 0 and gateway.pipeline.inflight == 0)


async def test_a_model_whose_replicas_never_sleep_fails_at_once(serve: Any) -> None:
    async with serve(large=RemoteEngine("large")) as gateway, gateway.client() as client:
        with pytest.raises(openai.InternalServerError, match="No replica of this model is up"):
            await ask(client)
