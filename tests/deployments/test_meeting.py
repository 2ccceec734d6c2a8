"""Engines that are reached over the network: only by those who know the secret; and who steers a deployment: one at a time."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gearshift.deployments import lease as lease_module
from gearshift.deployments.engine_server import EngineServer
from gearshift.deployments.lease import Lease
from gearshift.deployments.meeting import SECRET_BYTES
from gearshift.deployments.registry import Member
from gearshift.deployments.remote import RemoteEngine
from gearshift.platform.cache.embedded import EmbeddedRedis
from gearshift.platform.cache.store import Store
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.errors import Conflict, EngineUnavailable
from gearshift.platform.request import Message, Request, SamplingParams

SECRET, OTHER = "5" * SECRET_BYTES, "6" * SECRET_BYTES


@asynccontextmanager
async def replica(path: Path) -> AsyncIterator[tuple[EngineServer, EchoEngine, str]]:
    engine = EchoEngine()
    server = EngineServer(engine, lambda _, deltas: deltas)
    address = await server.start(path / "e.sock", "127.0.0.1", SECRET)
    yield server, engine, address
    await server.close()


async def answer(engine: RemoteEngine) -> str:
    request = Request("a", (Message("user", "one two"),), SamplingParams())
    return "".join([delta.text async for delta in engine.generate(request)])


@pytest.mark.anyio
async def test_an_engine_is_asked_over_the_network_by_those_who_know_the_secret(tmp_path: Path) -> None:
    async with replica(tmp_path) as (_, echo, address):
        for secret, there in ((SECRET, True), (OTHER, False), ("", False)):
            engine = RemoteEngine("m", secret=secret)
            await engine.refresh([address])
            if there:
                assert await answer(engine) == "one two"
            else:
                with pytest.raises(EngineUnavailable):
                    await answer(engine)
            await engine.close()
        assert echo.stats().prompt_tokens == 2


@pytest.mark.anyio
async def test_an_address_that_nobody_answers_is_skipped() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        engine = RemoteEngine("m", secret=SECRET)
        await engine.refresh([address])
        assert not engine.ready


def test_an_engine_is_reached_by_its_socket_on_its_own_node_and_by_its_port_from_others() -> None:
    here = Member(name="e", model="m", address="/e.sock", remote="10.0.0.1:5", node="10.0.0.1")
    assert (here.reached_from("10.0.0.1"), here.reached_from("10.0.0.2")) == ("/e.sock", "10.0.0.1:5")
    assert Member(name="e", model="m", address="/e.sock").reached_from("") == "/e.sock"


def test_one_steers_at_a_time(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "TTL_S", 0.5)
    monkeypatch.setattr(lease_module, "RENEW_S", 0.1)

    def store() -> Store:
        return Store(redis_server.url, "steered", 5.0)

    async def other(holder: str) -> None:
        mine = store()
        await mine.set(mine.key("controller"), holder.encode(), 60.0)
        await mine.close()

    asyncio.run(other("elsewhere 1 0.00"))
    with pytest.raises(Conflict, match="process 1 on elsewhere"):
        Lease(store)
    asyncio.run(other(f"{socket.gethostname()} {os.getpid()} 1.00"))  # that number was another process then
    lease = Lease(store)
    asyncio.run(other("elsewhere 2 0.00"))
    deadline = time.monotonic() + 10
    while lease.held:  # until it is taken over, as after a long pause
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease.give_back()
    monkeypatch.setattr(lease_module, "is_gone", lambda holder: True)
    for _ in range(2):  # what was given back is free
        second = Lease(store)
        assert second.held
        second.give_back()
