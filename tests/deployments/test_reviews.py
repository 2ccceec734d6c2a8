"""What waits for a human: on a real Redis, seen by the official client and by operators."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import openai
import pytest

from gearshift.deployments.admin import create_admin_app
from gearshift.deployments.reviews import Reviews
from gearshift.guardrails.review import Entry, Held, Status, broken, follows, opened
from gearshift.platform import config_file
from gearshift.platform.cache.store import Store
from gearshift.platform.config import Limits
from gearshift.platform.errors import Conflict, NotFound
from gearshift.platform.request import Message, Usage
from gearshift.platform.tenants import Caller

pytestmark = pytest.mark.anyio

CONFIG = """
models: {small: {echo: {}}}
prompts: {none: {}}
policies: {p: {version: 3, rules: [RULES]}}
releases: {r: {model: small, prompt: none, policy: p, sampling: {temperature: 0}}}
tiers: {cheap: {release: r}}
tenants: {dev: {open: true}}
"""
SECRET = "sk-abcdefghijklmnopqrstuvwx"
HELD = Held(
    tenant="acme",
    release="r",
    policy="p v3",
    rule="blocklist",
    stage="output",
    messages=(Message("user", "hello"),),
    answer="an answer",
    finish_reason="stop",
    usage=Usage(1, 2),
)
STATUSES: tuple[Status, ...] = ("approved", "rejected", "approved")
ACME = Caller("acme", frozenset("*"), Limits())


def config(stage: str, *more: str) -> str:
    rule = f"{{rule: blocklist, action: review, terms: [project nightfall], stages: [{stage}]}}"
    return CONFIG.replace("RULES", ", ".join((rule, *more)))


def admin(store: Store, stage: str = "input") -> httpx.AsyncClient:
    app = create_admin_app(lambda: config_file.parse(config(stage)), store, {})
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://admin", headers={"x-gearshift-who": "eve"}
    )


def asked(text: str) -> Any:
    return {"model": "cheap", "messages": [{"role": "user", "content": text}]}


async def test_a_question_waits_until_a_human_agrees(serve: Any, store: Store) -> None:
    body = asked(f"Tell me of Project Nightfall, {SECRET}")
    async with (
        serve(config("input", "{rule: secrets}")) as gateway,
        gateway.client() as client,
        admin(store) as operator,
    ):
        tickets = []
        for _ in range(2):
            with pytest.raises(openai.PermissionDeniedError) as caught:
                await client.chat.completions.create(**body)
            assert caught.value.code == "review_required"
            tickets.append(caught.value.response.headers["x-gearshift-ticket"])
            assert tickets[-1] in str(caught.value)
        assert gateway.engines["small"].stats().generation_tokens == 0
        [waiting] = (await operator.get("/admin/review?status=pending")).json()["tickets"]
        assert [waiting["id"]] * 2 == tickets
        assert waiting["held"]["messages"][0]["content"] == "Tell me of Project Nightfall, [REDACTED:secrets]"
        assert (waiting["held"]["rule"], waiting["held"]["policy"]) == ("blocklist", "p v3")
        told: Any = await client.get(f"/reviews/{tickets[0]}", cast_to=object)
        assert (told["status"], told["stage"], told["completion"]) == ("pending", "input", None)
        approved = await operator.post(f"/admin/review/{tickets[0]}", json={"decision": "approved", "why": "fine"})
        assert approved.json()["status"] == "approved"
        answer = await client.chat.completions.create(**body)
        assert answer.choices[0].message.content == "Tell me of Project Nightfall, [REDACTED:secrets]"


async def test_what_was_rejected_is_refused_from_then_on(serve: Any, store: Store) -> None:
    async with serve(config("input")) as gateway, gateway.client() as client, admin(store) as operator:
        with pytest.raises(openai.PermissionDeniedError) as held:
            await client.chat.completions.create(**asked("project nightfall"))
        ticket = held.value.response.headers["x-gearshift-ticket"]
        await operator.post(f"/admin/review/{ticket}", json={"decision": "rejected", "why": "no"})
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**asked("project nightfall"))
        assert (refused.value.code, ticket in str(refused.value)) == ("content_filter", True)
        told: Any = await client.get(f"/reviews/{ticket}", cast_to=object)
        assert (told["status"], told["reason"]) == ("rejected", "no")


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_held_from_the_place_on_and_picked_up_later(serve: Any, store: Store, stream: bool) -> None:
    text = "It is called project nightfall, you know, jo.doe@example.com"
    async with (
        serve(config("output", "{rule: email, stages: [output]}")) as gateway,
        gateway.client() as client,
        admin(store, "output") as operator,
    ):

        async def ask() -> tuple[str, str, list[str]]:
            if not stream:
                whole = await client.chat.completions.create(**asked(text))
                told = whole.model_extra.get("moderation") if whole.moderation is None else whole.moderation.to_dict()
                return whole.choices[0].message.content, whole.choices[0].finish_reason, (told or {}).get("tickets", [])
            said, reason, tickets = "", "", []
            async for chunk in await client.chat.completions.create(**asked(text), stream=True):
                said += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
                if chunk.choices[0].finish_reason and chunk.moderation is not None:
                    tickets = chunk.moderation.to_dict().get("tickets", [])
            return said, reason, tickets

        said, reason, [ticket] = await ask()
        assert ("nightfall" in said, reason) == (False, "content_filter")
        assert "It is called project nightfall, you know, [REDACTED:email]".startswith(said)
        assert await ask() == (said, reason, [ticket])  # the same answer is the same ticket
        [waiting] = (await operator.get("/admin/review?status=pending")).json()["tickets"]
        assert waiting["held"]["answer"] == "It is called project nightfall, you know, [REDACTED:email]"
        await operator.post(f"/admin/review/{ticket}", json={"decision": "approved"})
        told: Any = await client.get(f"/reviews/{ticket}", cast_to=object)
        choice = told["completion"]["choices"][0]
        assert choice["message"]["content"] == waiting["held"]["answer"]
        assert choice["finish_reason"] == "stop"
        assert await ask() == (waiting["held"]["answer"], "stop", [])  # and an approved one passes
        log = (await operator.get("/admin/review/log")).json()
        assert [entry["what"] for entry in log["entries"]] == ["opened", "approved", "picked_up"]
        assert log["broken_at"] is None


async def test_a_block_wins_over_a_review(serve: Any) -> None:
    rules = config("input", "{rule: blocklist, action: block, terms: [nightfall]}")
    async with serve(rules) as gateway, gateway.client() as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**asked("project nightfall"))


async def test_a_tenant_sees_its_own_tickets_only(store: Store) -> None:
    reviews = Reviews(store, 60)
    ticket = await reviews.hold(HELD)
    assert (await reviews.picked_up(ticket.id, ACME)).id == ticket.id
    for name, caller in ((ticket.id, Caller("umbrella", frozenset("*"), Limits())), ("rev_none", ACME)):
        with pytest.raises(NotFound):
            await reviews.picked_up(name, caller)


async def test_many_at_once_are_one_ticket_and_one_decision_and_the_log_is_whole(store: Store) -> None:
    gateways = [Reviews(store, 60) for _ in range(3)]
    others = [msgspec.structs.replace(HELD, answer=f"another {n}") for n in range(4)]
    tickets = await asyncio.gather(*(each.hold(held) for each in gateways for held in (HELD, HELD, *others)))
    assert len({ticket.id for ticket in tickets}) == 5
    first = tickets[0].id
    decided = await asyncio.gather(
        *(each.decide(first, status, "eve", "") for each, status in zip(gateways, STATUSES, strict=True)),
        return_exceptions=True,
    )
    assert sum(isinstance(each, Conflict) for each in decided) == 2
    log = await gateways[0].log()
    assert [entry.what for entry in log].count("opened") == 5
    assert (len(log), broken(log)) == (6, None)
    assert [ticket.status for ticket in await gateways[1].latest(10, "pending")] == ["pending"] * 4
    assert len(await gateways[1].latest(2)) == 2


async def test_tickets_end_by_themselves_and_the_log_stays(store: Store) -> None:
    reviews = Reviews(store, 0.05)
    ticket = await reviews.hold(HELD)
    async with asyncio.timeout(20):
        while (found := await reviews.hold(HELD)).id == ticket.id:
            await asyncio.sleep(0.01)
    with pytest.raises(NotFound):
        await reviews.get(ticket.id)
    assert ticket.id not in [each.id for each in await reviews.latest(10)]
    assert list(await store.hash_all(store.key("review", "tickets"))) == [found.id]
    assert {entry.ticket for entry in await reviews.log()} == {ticket.id, found.id}


def test_whatever_is_done_to_the_log_is_seen() -> None:
    log: list[Entry] = []
    for number in range(5):
        log.append(follows(log[-1] if log else None, opened(HELD), "opened", f"who {number}", ""))
    assert broken(log) is None
    changed = msgspec.structs.replace(log[1], why="another reason")
    assert broken([log[0], changed, *log[2:]]) == 3
    assert broken([*log[:2], *log[3:]]) == 3
    assert broken(log[1:]) == 1
    assert broken([*log[:3], log[2], *log[3:]]) == 4


async def test_verdicts_are_told_to_who_asks_for_them(serve: Any) -> None:
    rules = CONFIG.replace("RULES", "{rule: email}, {rule: secrets, stages: [input]}")
    async with serve(rules) as gateway, gateway.client() as client:
        body = asked("write to jo.doe@example.com")
        plain = await client.chat.completions.create(**body)
        assert plain.moderation is None
        for stream in (False, True):
            answer: Any = await client.chat.completions.create(**body, moderation={"model": "any"}, stream=stream)
            if stream:
                answer = [chunk async for chunk in answer][-1]
            told = answer.moderation
            assert told.input.results[0].categories == {"email": True, "secrets": False}
            assert told.input.results[0].flagged
            assert told.output.results[0].categories == {"email": False}
            assert told.input.model == "p v3"
