"""The HTTP API as the official client sees it, over a real socket and a real Redis."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.errors import EngineUnavailable, GearshiftError, UpstreamError
from gearshift.router.arms import PARTS, Segment, Snapshot, Trial

pytestmark = pytest.mark.anyio

BOB = "gs-bob"
TEXT = "one two three four five"


async def ask(gateway: Any, model: str = "cheap", text: str = TEXT, key: str = "gs-alice", **fields: Any) -> Any:
    async with gateway.client(key) as client:
        return await client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": text}], **fields
        )


def text_of(raw: Any) -> str:
    return str(raw.parse().choices[0].message.content)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_an_answer_says_what_happened_in_its_headers(serve: Any) -> None:
    async with serve() as gateway:
        raw = await ask(gateway)
    assert text_of(raw) == TEXT
    assert raw.headers["x-gearshift-tier"] == "cheap"
    assert raw.headers["x-gearshift-release"] == "small-v1"
    assert raw.headers["x-gearshift-route-reason"] == "tier"
    assert raw.headers["x-gearshift-cache"] == "miss"
    assert float(raw.headers["x-gearshift-overhead-ms"]) > 0
    assert raw.headers["x-request-id"] == raw.parse().id.replace("chatcmpl-", "req_")
    assert raw.parse().usage.total_tokens == 10


async def test_a_stream_has_the_same_text_as_the_whole_answer(serve: Any) -> None:
    async with serve() as gateway, gateway.client() as client:
        stream = await client.chat.completions.create(
            model="cheap",
            messages=[{"role": "user", "content": TEXT}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 5


async def test_a_stream_ends_with_done(serve: Any) -> None:
    async with serve() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        body = {"model": "cheap", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        response = await client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer gs-alice"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")


async def test_auto_routes_by_score_and_names_of_releases_pin(serve: Any) -> None:
    async with serve() as gateway:
        easy = await ask(gateway, "auto", "Hi there")
        hard = await ask(gateway, "auto", "Explain this python function and prove its complexity.")
        pinned = await ask(gateway, "large-v2")
    assert (easy.headers["x-gearshift-tier"], hard.headers["x-gearshift-tier"]) == ("cheap", "expensive")
    assert (pinned.headers["x-gearshift-release"], pinned.headers["x-gearshift-route-reason"]) == (
        "large-v2",
        "release",
    )


async def test_the_same_question_is_a_hit_for_its_tenant_and_a_miss_for_another(serve: Any) -> None:
    async with serve() as gateway:
        first = await ask(gateway)
        await gateway.pipeline.settled()
        again, other = await ask(gateway), await ask(gateway, key=BOB)
        thrice, another = await ask(gateway), await ask(gateway, text="hello again")
        generated = gateway.engines["small"].stats().generation_tokens
    parts = [raw.headers["x-gearshift-cache"] for raw in (first, again, other, thrice, another)]
    assert parts == ["miss", "hit", "miss", "hit", "miss"]
    assert text_of(first) == text_of(again) == text_of(thrice)
    assert again.parse().usage.prompt_tokens_details.cached_tokens == 5
    assert generated == 12


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 1}, "bypass"),
        ({"temperature": 1, "seed": 3}, "hit"),
        ({"temperature": 1, "extra_body": {"cache": {"mode": "all"}}}, "hit"),
        ({"extra_body": {"cache": {"mode": "off"}}}, "bypass"),
        ({"extra_headers": {"cache-control": "no-store"}}, "bypass"),
        ({"extra_headers": {"cache-control": "no-cache"}}, "refresh"),
    ],
)
async def test_what_is_cached_is_up_to_sampling_and_to_the_request(
    serve: Any, fields: dict[str, Any], expected: str
) -> None:
    async with serve() as gateway:
        await ask(gateway, **fields)
        await gateway.pipeline.settled()
        assert (await ask(gateway, **fields)).headers["x-gearshift-cache"] == expected


async def test_a_blocked_answer_is_not_stored(serve: Any) -> None:
    async with serve(TEXT_WITH_OUTPUT_RULE) as gateway:
        for _ in range(2):
            raw = await ask(gateway, text="this has forbidden words in it")
            await gateway.pipeline.settled()
            assert (raw.headers["x-gearshift-cache"], raw.parse().choices[0].finish_reason) == (
                "miss",
                "content_filter",
            )


async def test_a_broken_answer_is_not_stored(serve: Any) -> None:
    async with serve(small=EchoEngine(fail_after=3)) as gateway:
        with pytest.raises(openai.InternalServerError):
            await ask(gateway)
        await gateway.pipeline.settled()
        with pytest.raises(openai.InternalServerError):
            await ask(gateway)
        assert gateway.engines["small"].stats().aborted == 2


@pytest.mark.parametrize(
    ("key", "model", "kind", "code"),
    [
        ("gs-nobody", "cheap", openai.AuthenticationError, "invalid_api_key"),
        (BOB, "expensive", openai.PermissionDeniedError, "model_not_allowed"),
        (BOB, "auto", openai.PermissionDeniedError, "model_not_allowed"),
        ("gs-alice", "gpt-9", openai.NotFoundError, "model_not_found"),
    ],
)
async def test_who_may_ask_for_what(
    serve: Any, key: str, model: str, kind: type[openai.APIStatusError], code: str
) -> None:
    async with serve() as gateway:
        with pytest.raises(kind) as caught:
            await ask(gateway, model, key=key)
    assert caught.value.code == code
    assert caught.value.request_id
    assert key not in str(caught.value.body)


async def test_each_tenant_sees_its_own_models(serve: Any) -> None:
    async with serve() as gateway, gateway.client(BOB) as bob, gateway.client() as alice:
        assert [model.id async for model in bob.models.list()] == ["cheap"]
        assert len([model async for model in alice.models.list()]) == 6
        assert (await bob.models.retrieve("cheap")).id == "cheap"
        with pytest.raises(openai.NotFoundError):
            await bob.models.retrieve("expensive")


async def test_over_its_limit_a_tenant_is_told_when_to_come_again(serve: Any) -> None:
    async with serve() as gateway:
        first = await ask(gateway, key=BOB)
        await ask(gateway, key=BOB)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(gateway, key=BOB)
        await ask(gateway)  # another tenant is not touched
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "10000"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
    assert caught.value.response.headers["x-should-retry"] == "true"


async def test_redaction_on_input_and_output_and_a_blocked_question(serve: Any) -> None:
    async with serve() as gateway:
        answer = await ask(gateway, text="mail jo@example.com or 4111 1111 1111 1111 now")
        assert text_of(answer) == "mail [REDACTED:email] or [REDACTED:card] now"
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(gateway, text="say FORBIDDEN words")
        assert caught.value.code == "content_filter"
        assert gateway.engines["small"].stats().steps == 5  # the refused question never got there


async def test_a_blocked_answer_ends_with_content_filter_and_stops_the_engine(serve: Any) -> None:
    text = TEXT_WITH_OUTPUT_RULE
    async with serve(text) as gateway:
        raw = await ask(gateway, text="this has forbidden words in it and goes on and on and on")
        stats = gateway.engines["small"].stats()
    choice = raw.parse().choices[0]
    assert (choice.message.content, choice.finish_reason) == ("this has ", "content_filter")
    assert stats.aborted == 1
    assert stats.steps <= 6


TEXT_WITH_OUTPUT_RULE = """
models: {small: {echo: {}}}
prompts: {none: {}}
policies:
  p: {rules: [{rule: email, stages: [input]}, {rule: blocklist, stages: [output], action: block, terms: [forbidden words]}]}
releases: {r: {model: small, prompt: none, policy: p, sampling: {temperature: 0}}}
tiers: {cheap: {release: r}}
tenants: {dev: {open: true}}
"""


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_aborts_the_engine_and_frees_its_seat(serve: Any, stream: bool) -> None:
    body = {"model": "cheap", "messages": [{"role": "user", "content": TEXT}], "stream": stream}
    body |= {"max_completion_tokens": 10_000, "ignore_eos": True}
    async with serve(small=EchoEngine(delay_s=0.01)) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        engine = gateway.engines["small"]
        call = client.stream("POST", "/v1/chat/completions", json=body, headers={"authorization": "Bearer gs-alice"})
        if stream:
            async with call as response:
                assert response.status_code == 200
                await until(lambda: engine.stats().steps > 2)
        else:
            task = asyncio.create_task(call.__aenter__())
            await until(lambda: engine.stats().steps > 2)
            task.cancel()
        steps = engine.stats().steps
        await until(lambda: engine.stats().aborted == 1)
        assert engine.stats().running == 0
        assert engine.stats().steps <= steps + 2
        await until(lambda: gateway.pipeline.inflight == 0)


async def test_over_the_bound_requests_are_refused_at_once(serve: Any) -> None:
    slow = EchoEngine(delay_s=0.5)
    headers = {"authorization": "Bearer gs-alice"}
    bodies = [{"model": "cheap", "messages": [{"role": "user", "content": f"question {n}"}]} for n in range(7)]
    async with serve(small=slow) as gateway, httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
        posts = [client.post("/v1/chat/completions", json=body) for body in bodies]
        responses = await asyncio.gather(*posts)
    refused = [response for response in responses if response.status_code == 429]
    assert len(refused) == 3
    assert all(response.headers["retry-after"] == "1" for response in refused)
    assert all(response.json()["error"]["code"] == "overloaded" for response in refused)


async def test_an_answer_that_takes_too_long_is_a_504_and_not_retried(serve: Any) -> None:
    impatient = TEXT_WITH_OUTPUT_RULE + "gateway: {request_timeout_s: 0.3}"
    async with serve(impatient, small=EchoEngine(delay_s=0.2)) as gateway:
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(gateway)
        assert gateway.engines["small"].stats().running == 0
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert caught.value.response.headers["x-should-retry"] == "false"


async def test_an_error_after_the_first_token_is_an_event_and_the_end(serve: Any) -> None:
    async with serve(small=EchoEngine(fail_after=3)) as gateway:
        got: list[str] = []

        async def read() -> None:
            async with gateway.client() as client:
                messages = [{"role": "user", "content": TEXT}]
                async for chunk in await client.chat.completions.create(model="cheap", messages=messages, stream=True):
                    got.append(chunk.choices[0].delta.content)  # noqa: PERF401 -- what came before the error counts

        with pytest.raises(openai.APIError, match="replica that worked on the request is gone"):
            await read()
        assert "".join(got) == "one two "


class Odd(EchoEngine):
    """Fails before its first token with what no error table knows."""

    async def generate(self, request: Any) -> Any:
        if request:
            raise RuntimeError("secret internal detail")
        yield


async def test_internal_text_never_reaches_a_client(serve: Any) -> None:
    async with serve(small=Odd()) as gateway:
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(gateway)
    assert "secret" not in str(caught.value.body)
    assert caught.value.code == "internal_error"


@pytest.mark.parametrize("failure", [EngineUnavailable("gone"), UpstreamError("gone")])
async def test_the_router_s_choice_falls_back_before_the_first_token_and_a_client_s_does_not(
    serve: Any, failure: GearshiftError
) -> None:
    async with serve(small=EchoEngine(fail_after=0, failure=failure)) as gateway:
        raw = await ask(gateway, "auto", "Hi there")
        assert raw.headers["x-gearshift-tier"] == "expensive"
        with pytest.raises(openai.InternalServerError):
            await ask(gateway, "cheap", "Hi there")


async def test_the_operator_s_prompt_leads_and_is_not_redacted(serve: Any) -> None:
    async with serve(
        TEXT_WITH_OUTPUT_RULE.replace("{none: {}}", "{none: {system: Write to help@example.com}}")
    ) as gateway:
        raw = await ask(gateway)
    assert raw.parse().usage.prompt_tokens == 3 + 5


async def test_a_new_snapshot_moves_the_arm_of_the_next_request(serve: Any) -> None:
    async with serve() as gateway:
        before = await ask(gateway, "expensive")
        gateway.snapshot.append(Snapshot(1, {"manners": Trial((Segment(PARTS, "large-v2"),), period=1)}))
        after = await ask(gateway, "expensive")
    assert before.headers["x-gearshift-release"] == "large-v1"
    assert after.headers["x-gearshift-release"] == "large-v2"


async def test_paths_methods_bodies_that_are_not_there(serve: Any) -> None:
    async with serve() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        missing = await client.get("/v1/nothing")
        method = await client.get("/v1/chat/completions")
        broken = await client.post("/v1/chat/completions", content=b"{")
        large = await client.post("/v1/chat/completions", content=b"x" * 20_000)
    assert [r.status_code for r in (missing, method, broken, large)] == [404, 405, 400, 413]
    for response in (missing, method, broken, large):
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]


async def test_health_ready_and_metrics(serve: Any) -> None:
    async with serve() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        await ask(gateway)
        assert (await client.get("/health")).json()["status"] == "ok"
        assert (await client.get("/ready")).status_code == 200
        assert "gearshift_requests_total" in (await client.get("/metrics")).text
        gateway.pipeline.draining = True
        assert (await client.get("/ready")).json() == {"status": "not ready", "reason": "draining"}
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(gateway)
        assert caught.value.code == "shutting_down"


async def test_metrics_may_ask_for_a_token(serve: Any) -> None:
    text = TEXT_WITH_OUTPUT_RULE + "telemetry: {metrics_token_env: METRICS_TOKEN}"
    async with serve(text) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers={"authorization": "Bearer sesame"})).status_code == 200


async def test_bodies_are_json_for_any_client(serve: Any) -> None:
    async with serve() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        response = await client.post(
            "/v1/chat/completions",
            json={"model": "cheap", "messages": [{"role": "user", "content": "ünïcödé 👋"}]},
            headers={"authorization": "Bearer gs-alice"},
        )
    assert json.loads(response.content)["choices"][0]["message"]["content"] == "ünïcödé 👋"


async def test_several_answers_to_one_request(serve: Any) -> None:
    async with serve() as gateway:
        raw = await ask(gateway, n=3)
        answer = raw.parse()
        assert [(choice.index, choice.message.content) for choice in answer.choices] == [(n, TEXT) for n in range(3)]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 15)
        assert raw.headers["x-gearshift-cache"] == "bypass"
        async with gateway.client() as client:
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="cheap",
                    messages=[{"role": "user", "content": TEXT}],
                    n=2,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            ]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        for index in range(2):
            mine = [choice for choice in choices if choice.index == index]
            assert "".join(choice.delta.content or "" for choice in mine) == TEXT
            assert [choice.delta.role for choice in mine if choice.delta.role] == ["assistant"]
            assert mine[-1].finish_reason == "stop"
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [10]
        assert chunks[-1].usage is not None
        with pytest.raises(openai.BadRequestError, match="less than or equal to 16"):
            await ask(gateway, n=17)
        assert gateway.engines["small"].stats().running == 0
