"""Single flight on a real Redis. Each `Flights` is a gateway of its own: they share nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from gearshift.platform.cache import ahead
from gearshift.platform.cache import flight as flight_module
from gearshift.platform.cache.exact import Answer, ExactCache, Question
from gearshift.platform.cache.flight import Flights
from gearshift.platform.cache.store import Store
from gearshift.platform.errors import ContentBlocked, EngineUnavailable, Overloaded
from gearshift.platform.request import Delta, Message, SamplingParams, Usage

pytestmark = pytest.mark.anyio

QUESTION = Question("acme", "r", "fp_1", (Message("user", "hello"),), SamplingParams(temperature=0), "")
WORDS = ("a ", "b ", "c ", "d ", "e")


class Engine:
    """Generates in steps that a test lets happen; counts how often it was asked and how many of these came to their end."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.failure: Exception | None = None
        self.words = WORDS
        self.finish: Any = "stop"
        self._steps = asyncio.Semaphore(0)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._steps.release()

    async def generate(self) -> AsyncGenerator[Delta, None]:
        self.begun += 1
        for word in self.words:
            await self._steps.acquire()
            if self.failure is not None:
                raise self.failure
            yield Delta(word)
        self.ended += 1
        yield Delta("", self.finish, Usage(3, len(self.words)))


Gateway = Callable[[], Flights]


@pytest.fixture
def gateway(store: Store) -> Gateway:
    return lambda: Flights(store, ExactCache(store, 60, 100_000))


async def ask(flights: Flights, engine: Engine, question: Question = QUESTION) -> tuple[str, str, Usage | None]:
    parts: list[str] = []
    text, usage = "", None
    async with aclosing(answered(flights, engine, question, parts.append)) as deltas:
        async for delta in deltas:
            text, usage = text + delta.text, delta.usage
    return text, parts[-1], usage


async def answered(
    flights: Flights, engine: Engine, question: Question = QUESTION, told: Callable[[Any], None] = lambda _: None
) -> AsyncGenerator[Delta, None]:
    """As the pipeline does."""
    _, found = await flights.find(question)
    if isinstance(found, Answer):
        told("hit")
        for delta in found.deltas():
            yield delta
        return
    if found is not None:
        told("miss")
    with flights.led(found):
        coming = engine.generate() if found is not None else flights.follow(question, engine.generate, told)
        async with aclosing(coming):
            async for delta in coming:
                if found is not None:
                    found.add(delta)
                yield delta


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_hundred_equal_requests_at_two_gateways_are_one_generation(gateway: Gateway) -> None:
    engine, gateways = Engine(), (gateway(), gateway())
    asking = [asyncio.create_task(ask(gateways[number % 2], engine)) for number in range(100)]
    await until(lambda: engine.begun)
    engine.step(5)
    answers = await asyncio.gather(*asking)
    assert {text for text, _, _ in answers} == {"a b c d e"}
    assert {part for _, part, _ in answers} <= {"miss", "shared", "hit"}
    assert [part for _, part, _ in answers].count("miss") == 1
    assert {usage and usage.cached_tokens for _, part, usage in answers if part == "shared"} == {3}
    assert (engine.begun, engine.ended) == (1, 1)
    for each in gateways:
        await each.settled()
    assert (await ask(gateways[1], engine))[1] == "hit"


async def test_an_answer_that_was_read_early_is_used_for_its_very_question_only(store: Store) -> None:
    cache = ExactCache(store, 60, 100_000)
    flights, other = Flights(store, cache), msgspec.structs.replace(QUESTION, tenant="umbrella")
    assert flights.ahead.begin(1) is None
    flights.ahead.learn(1, QUESTION)
    answer = Answer(("here",), "stop", Usage(1, 1))
    early = flights.ahead.begin(1)
    assert early is not None
    assert (await flights.find(QUESTION, early=early))[0] == "miss"  # it was not there when it was read
    await cache.put(QUESTION, answer)
    early = flights.ahead.begin(1)
    assert (await flights.find(other, early=early))[0] == "miss"
    assert await flights.find(QUESTION, early=early) == ("hit", answer)


async def test_what_came_longest_ago_is_no_longer_read_early(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "KNOWN", 2)
    known = ahead.Ahead(ExactCache(store, 60, 100_000))
    for request in (1, 2, 1, 3):
        known.learn(request, QUESTION)
    early = {request: known.begin(request) for request in (1, 2, 3)}
    assert early[2] is None
    assert all([await each.answer("another") is None for each in (early[1], early[3]) if each is not None])


async def test_followers_see_the_answer_grow_here_and_elsewhere(gateway: Gateway) -> None:
    engine, here, elsewhere = Engine(), gateway(), gateway()
    leading = asyncio.create_task(ask(here, engine))
    await until(lambda: engine.begun)
    seen: dict[str, str] = {"here": "", "elsewhere": ""}

    async def follow(name: str, flights: Flights) -> None:
        async for delta in answered(flights, engine):
            seen[name] += delta.text

    following = [asyncio.create_task(follow(name, each)) for name, each in (("here", here), ("elsewhere", elsewhere))]
    for count in (1, 3):
        engine.step(count)
        wanted = "".join(WORDS[: 1 if count == 1 else 4])
        await until(lambda wanted=wanted: seen == {"here": wanted, "elsewhere": wanted})
    engine.step(1)
    await asyncio.gather(leading, *following)
    assert seen == {"here": "a b c d e", "elsewhere": "a b c d e"}
    assert engine.begun == 1


@pytest.mark.parametrize("same", [True, False])
async def test_when_the_leader_goes_away_one_follower_takes_over_and_goes_on(gateway: Gateway, same: bool) -> None:
    engine, here = Engine(), gateway()
    other = here if same else gateway()
    leading = asyncio.create_task(ask(here, engine))
    await until(lambda: engine.begun)
    texts = [""] * 5

    async def follow(number: int) -> None:
        async for delta in answered(other, engine):
            texts[number] += delta.text

    following = [asyncio.create_task(follow(number)) for number in range(5)]
    engine.step(2)
    await until(lambda: set(texts) == {"a b "})
    leading.cancel()  # its client has gone
    await until(lambda: engine.begun == 2)
    engine.step(5)
    await asyncio.gather(*following)
    assert set(texts) == {"a b c d e"}
    assert (engine.begun, engine.ended) == (2, 1)


async def test_a_gateway_that_is_killed_gives_its_lease_up_by_and_by(
    gateway: Gateway, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_module, "LEASE_MS", 300)
    engine, flights = Engine(), gateway()
    key = QUESTION.key
    await store.set(store.key("flight", key), b"of a gateway that nobody hears of any more", 0.3)
    engine.step(5)
    assert (await ask(flights, engine))[:2] == ("a b c d e", "miss")
    assert engine.begun == 1


async def test_a_leader_that_fails_leaves_everybody_to_himself(gateway: Gateway) -> None:
    engine, here, elsewhere = Engine(), gateway(), gateway()
    engine.failure = Overloaded("full")
    asking = [asyncio.create_task(ask(each, engine)) for each in (here, here, here, elsewhere)]
    await until(lambda: engine.begun)
    engine.step(40)
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(each, Overloaded) for each in found)
    engine.failure = None
    await here.settled()
    assert (await ask(here, engine))[1] == "miss"  # nothing of it was kept


async def test_what_was_blocked_is_shared_but_not_kept(gateway: Gateway) -> None:
    engine, flights = Engine(), gateway()
    engine.finish = "content_filter"
    asking = [asyncio.create_task(ask(flights, engine)) for _ in range(3)]
    await until(lambda: engine.begun)
    engine.step(5)
    assert [text for text, _, _ in await asyncio.gather(*asking)] == ["a b c d e"] * 3
    await flights.settled()
    engine.step(5)
    assert (await ask(flights, engine))[1] == "miss"
    assert engine.begun == 2


async def test_an_answer_that_comes_out_otherwise_is_not_patched_together(gateway: Gateway) -> None:
    engine, flights = Engine(), gateway()
    leading = asyncio.create_task(ask(flights, engine))
    await until(lambda: engine.begun)
    following = asyncio.create_task(ask(flights, engine))
    engine.step(2)
    await until(lambda: flights._flying[QUESTION.key].followers and len(flights._flying[QUESTION.key].deltas) == 2)
    await asyncio.sleep(0)
    engine.words = ("x ", "y ", "", "", "")
    leading.cancel()
    await until(lambda: engine.begun == 2)
    engine.step(2)
    with pytest.raises(EngineUnavailable, match="can't be gone on with"):
        await following


async def test_other_questions_are_other_flights(gateway: Gateway) -> None:
    engine, flights = Engine(), gateway()
    changes: list[dict[str, Any]] = [
        {"tenant": "globex"},
        {"release": "fp_2"},
        {"sampling": SamplingParams(temperature=0, max_tokens=5)},
        {"salt": "x"},
    ]
    others = [msgspec.structs.replace(QUESTION, **change) for change in changes]
    asking = [asyncio.create_task(ask(flights, engine, each)) for each in (QUESTION, *others)]
    await until(lambda: engine.begun == 5)
    engine.step(25)
    assert [part for _, part, _ in await asyncio.gather(*asking)] == ["miss"] * 5


async def test_without_redis_a_process_still_flies_once(tmp_path: Any) -> None:
    away = Store(f"unix://{tmp_path}/nobody.sock", "test", 0.2)
    engine, flights = Engine(), Flights(away, ExactCache(away, 60, 1000))
    asking = [asyncio.create_task(ask(flights, engine)) for _ in range(20)]
    await until(lambda: engine.begun)
    engine.step(5)
    answers = await asyncio.gather(*asking)
    assert [part for _, part, _ in answers].count("miss") == 1
    assert engine.begun == 1
    engine.failure = ContentBlocked("no")
    engine.step(1)
    with pytest.raises(ContentBlocked):
        await ask(flights, engine)
    await away.close()
