"""Limits and exact cache on a real Redis."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from gearshift.platform.cache.embedded import EmbeddedRedis
from gearshift.platform.cache.exact import Answer, ExactCache, Question, cacheable
from gearshift.platform.cache.limits import RateLimits
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Limits
from gearshift.platform.errors import LimitsUnavailable, RateLimited
from gearshift.platform.request import Message, SamplingParams, Usage

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0)
QUESTION = Question("acme", "r", "fp_1", (Message("user", "hello"),), GREEDY, "")
ANSWER = Answer(("he", "llo"), "stop", Usage(3, 2))
SLOW = Limits(requests_per_minute=3, tokens_per_minute=100)


async def test_requests_a_minute_run_out_and_say_when_to_come_again(store: Store) -> None:
    limits = RateLimits(store, "allow")
    for left in (2, 1, 0):
        reservation = await limits.reserve("acme", SLOW, tokens=1)
        assert reservation.headers()["x-ratelimit-remaining-requests"] == str(left)
    with pytest.raises(RateLimited) as caught:
        await limits.reserve("acme", SLOW, tokens=1)
    assert 0 < (caught.value.retry_after_s or 0) <= 20
    assert (await limits.reserve("other", SLOW, tokens=1)).requests_left is not None


async def test_unused_tokens_come_back_and_used_ones_are_gone(store: Store) -> None:
    limits = RateLimits(store, "allow")
    reservation = await limits.reserve("acme", SLOW, tokens=90)
    with pytest.raises(RateLimited):
        await limits.reserve("acme", SLOW, tokens=50)
    limits.settle(reservation, used=10)
    await limits.settled()
    again = await limits.reserve("acme", SLOW, tokens=50)
    assert again.tokens_left is not None
    assert 40 <= again.tokens_left.remaining < 90  # 100 - 10 - 50, and a little that has been refilled meanwhile
    limits.settle(again, used=95)  # more than was reserved, and more than there is: a debt
    await limits.settled()
    with pytest.raises(RateLimited):
        await limits.reserve("acme", SLOW, tokens=1)


async def test_a_request_larger_than_a_minute_s_tokens_can_never_pass(store: Store) -> None:
    with pytest.raises(RateLimited, match="lower max_completion_tokens") as caught:
        await RateLimits(store, "allow").reserve("acme", SLOW, tokens=101)
    assert caught.value.retry_after_s is None


async def test_two_gateways_share_one_count(store: Store) -> None:
    gateways = [RateLimits(store, "allow"), RateLimits(store, "allow")]
    results = await asyncio.gather(
        *(gateways[n % 2].reserve("acme", SLOW, tokens=1) for n in range(10)), return_exceptions=True
    )
    assert sum(not isinstance(result, Exception) for result in results) == 3


async def test_a_long_answer_is_kept_compressed_and_one_that_unpacks_to_too_much_is_none(store: Store) -> None:
    cache = ExactCache(store, ttl_s=60, max_answer_bytes=10_000)
    long = Answer(("All work and no play. " * 200, "end"), "stop", Usage(3, 900))
    await cache.put(QUESTION, long)
    assert len(await store.get(cache.key(QUESTION)) or b"") < 500
    assert await cache.get(QUESTION) == long
    assert await ExactCache(store, 60, max_answer_bytes=1000).get(QUESTION) is None


async def test_an_answer_is_found_again_whole(store: Store) -> None:
    cache = ExactCache(store, ttl_s=60, max_answer_bytes=1000)
    assert await cache.get(QUESTION) is None
    await cache.put(QUESTION, ANSWER)
    found = await cache.get(QUESTION)
    assert found == ANSWER
    assert [delta.text for delta in found.deltas()] == ["he", "llo", ""]
    assert found.deltas()[-1].usage == Usage(3, 2, cached_tokens=3)


def differing() -> list[Question]:
    """Questions of which no two may share an answer: each differs from QUESTION in one field."""
    replace = msgspec.structs.replace
    questions = [
        QUESTION,
        replace(QUESTION, tenant="evil"),
        replace(QUESTION, release="fp_2"),
        replace(QUESTION, salt="s"),
    ]
    changed: dict[str, object] = {"stop": ("x",), "stop_token_ids": (1,), "ignore_eos": True}
    for field in dataclasses.fields(SamplingParams):
        value = changed.get(field.name, 0.123 if "float" in str(field.type) else 7)
        questions.append(replace(QUESTION, sampling=dataclasses.replace(GREEDY, **{field.name: value})))  # type: ignore[arg-type]
    hello = QUESTION.messages[0]
    conversations = [
        (dataclasses.replace(hello, role="system"),),
        (dataclasses.replace(hello, content="hello "),),
        (dataclasses.replace(hello, name="x"),),
        (hello, dataclasses.replace(hello, content="")),
        (),
    ]
    return [*questions, *(replace(QUESTION, messages=messages) for messages in conversations)]


def test_whatever_changes_an_answer_changes_the_key() -> None:
    questions = differing()
    assert len(questions) > 18
    assert len({question.key for question in questions}) == len(questions)


def test_only_deterministic_answers_are_cached_unless_asked() -> None:
    sampled = SamplingParams(temperature=0.7)
    assert cacheable("deterministic", GREEDY)
    assert cacheable("deterministic", dataclasses.replace(sampled, seed=1))
    assert not cacheable("deterministic", sampled)
    assert cacheable("all", sampled)
    assert not cacheable("off", GREEDY)


async def test_a_damaged_foreign_or_too_long_value_is_a_miss(store: Store) -> None:
    cache = ExactCache(store, ttl_s=60, max_answer_bytes=1000)
    key = cache.key(QUESTION)
    await cache.put(QUESTION, ANSWER)
    whole = await store.get(key)
    assert whole is not None
    for damaged in (b"", b"short", whole[:-1], whole[:-1] + b"x", b"\0" * 40):
        await store.set(key, damaged, 60)
        assert await cache.get(QUESTION) is None
    other = Question("acme", "r", "fp_1", (Message("user", "long"),), GREEDY, "")
    await cache.put(other, Answer(("x" * 2000,), "stop", Usage(1, 1)))
    assert await cache.get(other) is None


async def test_answers_expire(store: Store) -> None:
    cache = ExactCache(store, ttl_s=0.05, max_answer_bytes=1000)
    await cache.put(QUESTION, ANSWER)
    await asyncio.sleep(0.1)
    assert await cache.get(QUESTION) is None


async def test_without_redis_the_cache_misses_limits_follow_the_config_and_it_heals(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    store = Store(server.url, "ns", timeout_s=1.0)
    cache = ExactCache(store, ttl_s=60, max_answer_bytes=1000)
    await cache.put(QUESTION, ANSWER)
    server.close()
    assert await cache.get(QUESTION) is None
    await cache.put(QUESTION, ANSWER)
    assert (await RateLimits(store, "allow").reserve("acme", SLOW, 1)).headers() == {}
    with pytest.raises(LimitsUnavailable):
        await RateLimits(store, "deny").reserve("acme", SLOW, 1)
    server = EmbeddedRedis(tmp_path)
    async with asyncio.timeout(20):
        while await cache.get(QUESTION) is None:
            await cache.put(QUESTION, ANSWER)
            await asyncio.sleep(0.05)
    assert (await RateLimits(store, "deny").reserve("acme", SLOW, 1)).requests_left is not None
    await store.close()
    server.close()


def test_an_embedded_server_that_died_is_started_again(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    first = server.pid
    assert not server.revive()
    os.kill(first, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first)], timeout=5)
    assert server.revive()
    assert server.pid != first
    server.close()


async def test_a_redis_that_hangs_costs_one_timeout_and_then_nothing(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    store = Store(server.url, "ns", timeout_s=0.2)
    assert await store.get("x") is None
    psutil.Process(server.pid).suspend()
    calls = 0
    begun = time.monotonic()
    while time.monotonic() - begun < 0.6:
        with pytest.raises(StoreAway):
            await store.get("x")
        calls += 1
        await asyncio.sleep(0)
    assert calls > 10  # all but the first were told at once
    psutil.Process(server.pid).resume()
    await store.close()
    server.close()


async def test_many_commands_at_once_each_get_their_own_reply(store: Store) -> None:
    await asyncio.gather(*(store.set(f"k{n}", str(n).encode(), 60) for n in range(200)))
    abandoned = [asyncio.create_task(store.get(f"k{n}")) for n in range(50)]
    await asyncio.sleep(0)
    for task in abandoned[::2]:
        task.cancel()
    values = await asyncio.gather(*(store.get(f"k{n}") for n in range(200)))
    assert values == [str(n).encode() for n in range(200)]


def test_the_embedded_server_ends_with_its_parent_even_when_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from gearshift.platform.cache.embedded import EmbeddedRedis;"
        "server = EmbeddedRedis(Path(sys.argv[1])); print(server.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    os.kill(parent.pid, 9)
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()
