"""Gateway and engine replica over a real socket: frames, aborts, loss, drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gearshift.deployments import remote as remote_module
from gearshift.deployments.engine_server import EngineServer
from gearshift.deployments.remote import RemoteEngine
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.errors import ContextLengthExceeded, EngineUnavailable, Overloaded
from gearshift.platform.request import Delta, Message, Request, SamplingParams

pytestmark = pytest.mark.anyio


def ask(name: str, text: str = "one two three", **sampling: Any) -> Request:
    return Request(name, (Message("user", text),), SamplingParams(**sampling))


async def answer(engine: Any, request: Request) -> str:
    return "".join([delta.text async for delta in engine.generate(request)])


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def replica(path: Path, engine: EchoEngine) -> AsyncIterator[EngineServer]:
    server = EngineServer(engine, lambda _, deltas: deltas)
    await server.start(path)
    yield server
    await server.close()


@asynccontextmanager
async def remote(*paths: Path) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine("model")
    await engine.refresh(map(str, paths))
    yield engine
    await engine.close()


async def test_many_answers_share_one_connection(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with replica(path, EchoEngine()), remote(path) as engine:
        texts = [f"answer number {n} " + "x " * n for n in range(40)]
        got = await asyncio.gather(*(answer(engine, ask(f"{n}", text)) for n, text in enumerate(texts)))
    assert got == [" ".join(text.split()) for text in texts]


async def test_an_abandoned_answer_is_aborted_at_the_engine(tmp_path: Path) -> None:
    path, echo = tmp_path / "a.sock", EchoEngine(delay_s=0.005)
    async with replica(path, echo), remote(path) as engine:
        async with aclosing(engine.generate(ask("a", ignore_eos=True, max_tokens=10_000))) as deltas:
            await anext(deltas)
        steps = echo.stats().steps
        await until(lambda: echo.stats().aborted == 1)
        assert echo.stats().running == 0
        assert echo.stats().steps <= steps + 2


async def test_a_gateway_that_dies_aborts_all_its_requests(tmp_path: Path) -> None:
    path, echo = tmp_path / "a.sock", EchoEngine(delay_s=0.005)
    async with replica(path, echo):
        async with remote(path) as engine:
            tasks = [
                asyncio.create_task(answer(engine, ask(f"{n}", ignore_eos=True, max_tokens=10_000))) for n in range(3)
            ]
            await until(lambda: echo.stats().running == 3)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineUnavailable) for result in results)
        await until(lambda: echo.stats().aborted == 3)


async def test_errors_arrive_as_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with replica(path, EchoEngine(max_model_len=2)), remote(path) as engine:
        with pytest.raises(ContextLengthExceeded) as caught:
            await answer(engine, ask("a"))
    assert caught.value.param == "messages"


async def test_a_lost_replica_is_known_at_once_and_another_takes_what_had_not_begun(tmp_path: Path) -> None:
    first, second = tmp_path / "a.sock", tmp_path / "b.sock"
    dying = EchoEngine(delay_s=30)
    async with replica(second, EchoEngine()):
        async with replica(first, dying):
            engine = RemoteEngine("model")
            await engine.refresh([str(first)])
            waiting = asyncio.create_task(answer(engine, ask("a")))
            await until(lambda: dying.stats().running == 1)
            await engine.refresh([str(first), str(second)])
        assert await waiting == "one two three"
        await engine.close()


async def test_an_answer_that_had_begun_goes_on_at_another_replica(tmp_path: Path) -> None:
    first, second = tmp_path / "a.sock", tmp_path / "b.sock"
    other = EchoEngine()
    async with replica(second, other):
        async with replica(first, EchoEngine(delay_s=0.02)):
            engine = RemoteEngine("model")
            await engine.refresh([str(first)])
            deltas = engine.generate(ask("a", ignore_eos=True, max_tokens=100))
            begun = [await anext(deltas) for _ in range(5)]
            await engine.refresh([str(first), str(second)])
        rest = [delta async for delta in deltas]
        await engine.close()
    text = "".join(delta.text for delta in begun + rest)
    assert text == " ".join((["one", "two", "three"] * 34)[:100])
    assert (rest[-1].finish_reason, rest[-1].usage and rest[-1].usage.completion_tokens) == ("length", 100)
    assert other.stats().generation_tokens < 100


async def test_an_answer_that_had_begun_waits_a_while_for_a_replica_that_comes_up(tmp_path: Path) -> None:
    first, second = tmp_path / "a.sock", tmp_path / "b.sock"
    engine = RemoteEngine("model")
    async with replica(first, EchoEngine(delay_s=0.02)):
        await engine.refresh([str(first)])
        deltas = engine.generate(ask("a", ignore_eos=True, max_tokens=30))
        begun = [await anext(deltas)]
    waiting = asyncio.create_task(rest_of(deltas))
    await until(lambda: not engine.ready)
    assert not waiting.done()
    async with replica(second, EchoEngine()):
        await engine.refresh([str(second)])
        rest = await waiting
    await engine.close()
    assert sum(len(delta.text.split()) for delta in begun + rest) == 30


async def test_an_answer_that_can_not_go_on_ends_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody comes up in time; or its tokens were told with more than their text, which another replica might tell otherwise."""
    monkeypatch.setattr(remote_module, "RESUME_WAIT_S", 0.2)
    first, second = tmp_path / "a.sock", tmp_path / "b.sock"
    cases: list[tuple[list[Path], dict[str, Any]]] = [([first], {}), ([first, second], {"certainty": True})]
    for others, sampling in cases:
        async with replica(second, EchoEngine()):
            async with replica(first, EchoEngine(delay_s=0.02)):
                engine = RemoteEngine("model")
                await engine.refresh([str(first)])
                deltas = engine.generate(ask("a", ignore_eos=True, max_tokens=1000, **sampling))
                await anext(deltas)
                await engine.refresh(map(str, others))
            with pytest.raises(EngineUnavailable):
                await rest_of(deltas)
            await engine.close()


async def test_a_stream_that_brings_one_engine_down_after_the_other_ends(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.sock" for n in range(5)]
    engines = [EchoEngine(fail_after=n + 1) for n in range(5)]
    async with AsyncExitStack() as stack:
        for path, each in zip(paths, engines, strict=True):
            await stack.enter_async_context(replica(path, each))
        engine = await stack.enter_async_context(remote(*paths))
        with pytest.raises(EngineUnavailable):
            await answer(engine, ask("a", "w " * 50))
    assert sum(each.stats().prompt_tokens > 0 for each in engines) <= 1 + remote_module.MOST_RESUMES


async def rest_of(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    return [delta async for delta in deltas]


async def test_a_full_replica_sends_the_request_on_and_full_everywhere_is_overload(tmp_path: Path) -> None:
    first, second = tmp_path / "a.sock", tmp_path / "b.sock"
    engines = [EchoEngine(delay_s=0.05, max_running=2), EchoEngine(delay_s=0.05, max_running=2)]
    async with replica(first, engines[0]), replica(second, engines[1]), remote(first, second) as engine:
        results = await asyncio.gather(*(answer(engine, ask(f"{n}")) for n in range(6)), return_exceptions=True)
    assert sum(result == "one two three" for result in results) == 4
    assert sum(isinstance(result, Overloaded) for result in results) == 2


async def test_what_begins_the_same_goes_where_it_was_and_a_long_queue_sends_it_elsewhere(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.sock" for name in "abc"]
    engines = [EchoEngine(delay_s=0.01) for _ in paths]
    async with (
        replica(paths[0], engines[0]),
        replica(paths[1], engines[1]),
        replica(paths[2], engines[2]),
        remote(*paths) as engine,
    ):
        for n in range(12):
            await answer(engine, ask(f"s{n}", "The same long beginning. " * 40 + f"And {n}", max_tokens=1))
        used = [each.stats().prompt_tokens > 0 for each in engines]
        assert used.count(True) == 1
        await asyncio.gather(*(answer(engine, ask(f"m{n}", f"{n} other. " * 200, max_tokens=20)) for n in range(30)))
        counts = [each.stats().prompt_tokens for each in engines]
    assert min(counts) > 0.5 * max(counts)


async def test_a_draining_replica_finishes_and_gets_nothing_new(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with replica(path, EchoEngine(delay_s=0.05)) as server, remote(path) as engine:
        running = asyncio.create_task(answer(engine, ask("a")))
        await until(lambda: server.busy)
        draining = asyncio.create_task(server.drain(timeout_s=5))
        await until(lambda: not engine.ready)
        with pytest.raises(EngineUnavailable):
            await answer(engine, ask("b"))
        assert await running == "one two three"
        await draining


async def test_without_replicas_a_request_is_told_when_to_come_again() -> None:
    with pytest.raises(EngineUnavailable) as caught:
        await answer(RemoteEngine("model"), ask("a"))
    assert caught.value.retry_after_s


async def test_a_socket_that_nobody_answers_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "dead.sock").touch()
    path = tmp_path / "a.sock"
    async with replica(path, EchoEngine()), remote(tmp_path / "dead.sock", path) as engine:
        assert await answer(engine, ask("a")) == "one two three"
