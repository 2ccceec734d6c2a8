from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from gearshift.deployments.control import SnapshotBoard
from gearshift.deployments.webhooks import Webhooks
from gearshift.platform import config_file
from gearshift.platform.cache.store import Store
from gearshift.platform.errors import ConfigError

pytestmark = pytest.mark.anyio

TEXT = """
models: {m: {echo: {}}}
prompts: {none: {}}
policies: {none: {}}
releases: {a: {model: m, prompt: none, policy: none}, b: {model: m, prompt: none, policy: none}}
experiments: {x: {arms: {a: 1, b: 1}}}
tiers: {cheap: {experiment: x}}
tenants: {dev: {open: true}}
evaluation: {webhooks: [{url: "%s", secret_env: HOOK}]}
"""


@asynccontextmanager
async def receiver(statuses: list[int]) -> AsyncIterator[tuple[str, list[tuple[dict[str, Any], bool]]]]:
    """Answers with the statuses, then 200; gives its address, and what it took: body, and whether it was signed."""
    taken: list[tuple[dict[str, Any], bool]] = []

    async def take(request: web.Request) -> web.Response:
        body = await request.read()
        at, signed = (part.partition("=")[2] for part in request.headers["x-gearshift-signature"].split(","))
        wanted = hmac.new(b"sesame", at.encode() + b"." + body, hashlib.sha256).hexdigest()
        if statuses:
            return web.Response(status=statuses.pop(0))
        taken.append((json.loads(body), signed == wanted))
        return web.Response()

    app = web.Application()
    app.router.add_post("/hook", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}/hook", taken
    await runner.cleanup()


async def noted(store: Store, url: str, count: int) -> None:
    """Until so many changes are noted as told; what was delivered but not yet noted would be told again."""
    async with asyncio.timeout(15):
        while (await store.hash_all(store.key("webhooks"))).get(url) != str(count).encode():
            await asyncio.sleep(0.01)


async def test_every_change_is_told_once_signed_and_again_when_it_was_refused(store: Store) -> None:
    async with receiver([500, 503]) as (url, taken):
        config = config_file.parse(TEXT % url)
        board = SnapshotBoard(store, config)
        await board.set_weights("x", {"a": 1}, "ann", "before anybody listened")
        for expected in (["weights a 9, b 1"], ["weights a 9, b 1", "rolled back"]):
            task = asyncio.create_task(Webhooks(config, store, {"HOOK": "sesame"}, first_wait_s=0.01).run())
            await noted(store, url, len(expected))
            if len(expected) == 1:
                await board.set_weights("x", {"a": 9, "b": 1}, "ann", "slowly")
            else:
                await board.abort("x", "bob", "no")
            await noted(store, url, 1 + len(expected))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert [body["what"] for body, _ in taken] == expected
    assert all(signed for _, signed in taken)
    assert taken[1][0] | {"at": 0, "epoch": 0} == {
        "type": "gearshift.experiment", "epoch": 0, "at": 0, "who": "bob", "experiment": "x", "what": "rolled back", "why": "no",
    }  # fmt: skip


async def test_only_https_or_loopback_is_called() -> None:
    config_file.parse(TEXT % "https://example.com/hook")
    for url in ("http://example.com/hook", "ftp://127.0.0.1/", "http://127.0.0.1.example.com/"):
        with pytest.raises(ConfigError, match=r"webhooks\.0\.url"):
            config_file.parse(TEXT % url)
