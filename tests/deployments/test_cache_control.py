"""Answers that are shared or kept, as clients and operators see them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from gearshift.deployments.admin import create_admin_app
from gearshift.deployments.cli_cache import summary
from gearshift.platform import config_file
from gearshift.platform.cache.exact import Answer, ExactCache, Question
from gearshift.platform.cache.store import Store
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.request import Message, SamplingParams, Usage

pytestmark = pytest.mark.anyio

CONFIG = config_file.parse(
    """
models: {m: {echo: {}}}
prompts: {none: {}}
policies: {none: {}}
releases: {a: {model: m, prompt: none, policy: none}, b: {model: m, prompt: none, policy: none}}
tiers: {cheap: {release: a}}
tenants: {acme: {open: true}, globex: {}}
"""
)


async def test_equal_requests_at_once_are_one_generation_and_are_told_as_such(serve: Any) -> None:
    engine = EchoEngine(delay_s=0.02)
    async with serve(small=engine) as gateway, gateway.client() as client:

        async def ask(text: str, stream: bool) -> tuple[str, str, int]:
            raw = await client.chat.completions.with_raw_response.create(
                model="small-v1", messages=[{"role": "user", "content": text}], stream=stream
            )
            answer = raw.parse()
            if stream:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
                return text, raw.headers["x-gearshift-cache"], 0
            details = answer.usage.prompt_tokens_details
            return answer.choices[0].message.content, raw.headers["x-gearshift-cache"], details.cached_tokens

        same = [ask("one two three", n % 2 == 1) for n in range(4)]  # as many as the gateway takes
        found = await asyncio.gather(*same)
        assert {text for text, _, _ in found} == {"one two three"}
        assert sorted(part for _, part, _ in found) == ["miss", "shared", "shared", "shared"]
        assert engine.stats().prompt_tokens == 3
        assert {cached for _, part, cached in found if part == "shared"} <= {0, 3}
        await gateway.pipeline.settled()
        assert (await ask("one two three", False))[1] == "hit"
        told = {(each["tenant"], each["release"]): each for each in summary(generate_latest().decode())}
        mine = told["alice", "small-v1"]
        assert mine["shared"] >= 3
        assert mine["hit"] >= 1
        assert mine["saved_tokens"] >= 4 * 6
        assert mine["saved_dollars"] == pytest.approx(mine["saved_tokens"] / 6 * (3 * 1 + 3 * 2) / 1e6, rel=0.5)


async def test_a_purge_deletes_what_it_names_and_nothing_else(store: Store) -> None:
    cache = ExactCache(store, 60, 1000)
    questions = {
        (tenant, release): Question(tenant, release, "fp", (Message("user", "hi"),), SamplingParams(), "")
        for tenant in ("acme", "globex")
        for release in ("a", "b", "gone")
    }

    async def kept() -> set[tuple[str, str]]:
        return {names for names, question in questions.items() if await cache.get(question) is not None}

    async def fill() -> None:
        for question in questions.values():
            await cache.put(question, Answer(("hello",), "stop", Usage(1, 1)))

    app = create_admin_app(lambda: CONFIG, store, {})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://admin") as client:

        async def purge(**names: str) -> httpx.Response:
            return await client.post("/admin/cache/purge", json=names)

        await fill()
        assert (await client.get("/admin/cache")).json() == {"answers": 6}
        assert (await purge(tenant="acme", release="a")).json() == {"deleted": 1}
        assert await kept() == set(questions) - {("acme", "a")}
        assert (await purge(release="gone")).json() == {"deleted": 2}
        assert (await purge(tenant="globex")).json() == {"deleted": 2}
        assert await kept() == {("acme", "b")}
        for names, status in (({"tenant": "nobody"}, 404), ({"release": "*"}, 400), ({"all": "x"}, 422)):
            assert (await purge(**names)).status_code == status
        assert await kept() == {("acme", "b")}
        await fill()
        assert (await purge()).json() == {"deleted": 6}
        assert await kept() == set()


async def ask(client: Any, model: str = "small-v1", **more: Any) -> str:
    raw = await client.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": "one two three"}], **more
    )
    return str(raw.headers["x-gearshift-cache"])


async def test_a_refreshed_answer_takes_the_place_of_the_kept_one(serve: Any) -> None:
    engine = EchoEngine()
    async with serve(small=engine) as gateway, gateway.client() as client:
        for headers, said in (
            ({}, "miss"),
            ({}, "hit"),
            ({"cache-control": "max-age=0, no-cache"}, "refresh"),
            ({}, "hit"),
        ):
            assert await ask(client, extra_headers=headers) == said
            await gateway.pipeline.settled()
        assert engine.stats().prompt_tokens == 2 * 3


async def test_operators_may_forbid_to_go_past_the_cache_and_releases_may_keep_more(
    serve: Any, base_config: str
) -> None:
    text = base_config.replace("sampling: {temperature: 0}}", "sampling: {temperature: 1}, cache: all}", 1)
    async with serve(text, "cache: {bypass: false}\n") as gateway, gateway.client() as client:
        assert await ask(client) == "miss"
        await gateway.pipeline.settled()
        for more in (
            {},
            {"extra_headers": {"cache-control": "no-store"}},
            {"extra_headers": {"cache-control": "no-cache"}},
            {"extra_body": {"cache": {"mode": "off"}}},
        ):
            assert await ask(client, **more) == "hit", more
