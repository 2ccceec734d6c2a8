"""The semantic cache: what makes two questions of one, and an index on a real Redis."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gearshift.eval.paraphrases import KINDS, adversarial
from gearshift.platform.cache.exact import Answer, ExactCache, Question, comparable
from gearshift.platform.cache.flight import Flight, Flights
from gearshift.platform.cache.index import VectorIndex
from gearshift.platform.cache.paraphrase import Pair, read, vetoes
from gearshift.platform.cache.store import Store
from gearshift.platform.config import Semantic
from gearshift.platform.request import Message, SamplingParams, Usage

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0)
ANSWER = Answer(("Par", "is"), "stop", Usage(9, 2))


def asked(text: str, *before: Message, **fields: Any) -> Question:
    return Question("acme", "r", "fp", (*before, Message("user", text)), fields.pop("sampling", GREEDY), "", **fields)


def why_not(one: str, other: str) -> list[str]:
    return vetoes(Pair.of(read(one), read(other)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_looks_alike_and_asks_something_else_is_told_apart(kind: str) -> None:
    pairs = [pair for pair in adversarial(60, seed=1) if pair.kind == kind]
    assert [pair for pair in pairs if not why_not(pair.one, pair.other)] == []
    assert [pair for pair in pairs if not why_not(pair.other, pair.one)] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I learn to swim?", "How can I learn swimming?"),
        ("What is the capital of France?", "what's the capital of France"),
        ("What is the difference between tea and coffee?", "What's the difference between coffee and tea?"),
        ("How much is 1,000 dollars in yen?", "How much is 1000 USD in yen?"),
        ("Why is two better than one?", "Why is 2 better than one?"),
        ("Which are the biggest lakes of Canada?", "What are the largest lakes in Canada?"),
        ("How can I improve the performance of my laptop?", "How do I improve my laptop's performance?"),
        ("Does it matter whether or not I eat breakfast?", "Does it matter if I eat breakfast?"),
    ],
)
def test_a_paraphrase_is_let_through_to_be_judged(one: str, other: str) -> None:
    assert why_not(one, other) == []


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ("Привет, как дела?", "Привет, где ты?", "script"),
        ('Who said "to be"?', 'Who said "or not"?', "quotation"),
        ("When did he arrive?", "Where did he arrive?", "question"),
    ],
)
def test_what_else_makes_another_question(one: str, other: str, reason: str) -> None:
    assert reason in why_not(one, other)


def test_only_what_differs_in_nothing_but_the_last_question_is_compared() -> None:
    base = asked("a", Message("system", "be brief"))
    assert base.partition == asked("b", Message("system", "be brief")).partition
    others = [
        asked("b", Message("system", "be long")),
        asked("b"),
        msgspec.structs.replace(base, tenant="globex"),
        msgspec.structs.replace(base, name="s"),
        msgspec.structs.replace(base, release="fp2"),
        msgspec.structs.replace(base, salt="s"),
        msgspec.structs.replace(base, judge="j"),
        msgspec.structs.replace(base, generation=1),
        asked("b", Message("system", "be brief"), sampling=replace(GREEDY, max_tokens=7)),
    ]
    assert len({each.partition for each in (base, *others)}) == 1 + len(others)


def test_conversations_and_what_is_sampled_are_not_compared_unless_it_is_wanted() -> None:
    settings = Semantic()
    talk = asked("and then?", Message("user", "a"), Message("assistant", "b"))
    assert comparable(asked("a", Message("system", "be brief")), settings)
    assert not comparable(talk, settings)
    assert comparable(talk, settings.model_copy(update={"multi_turn": True}))
    assert not comparable(asked("a", sampling=SamplingParams(temperature=0.5, seed=1)), settings)
    assert not comparable(asked("a" * 1001), settings)
    assert not comparable(asked("a", raw=True), settings)
    assert not comparable(Question("acme", "r", "fp", (Message("assistant", "a"),), GREEDY, ""), settings)


def vector(*values: float) -> Any:
    found = np.array(values, np.float32)
    return found / np.linalg.norm(found)


def test_partitions_never_meet_and_the_oldest_go() -> None:
    index = VectorIndex(3, "test", most=2)
    for place, (partition, key) in enumerate([("p", "a"), ("p", "b"), ("q", "c")]):
        index.add(partition, key, key, vector(1, 0.1 * place, 0))
    near = vector(1, 0, 0)
    assert [known.key for known in index.nearest("p", near, 5)] == ["a", "b"]
    assert [known.key for known in index.nearest("q", near, 5)] == ["c"]
    assert index.nearest("r", near, 5) == []
    index.add("p", "d", "d", near)
    assert {known.key for known in index.nearest("p", near, 5)} == {"b", "d"}
    index.remove("q", ["c"])
    assert index.nearest("q", near, 5) == []
    assert index.keys() == {"p": ["b", "d"]}
    index.close()


class Similar:
    """Knows one question, whatever is asked."""

    def __init__(self) -> None:
        self.known: Answer | None = None
        self.added: list[Question] = []
        self.failure: BaseException | None = None

    async def find(self, question: Question) -> Answer | None:
        if self.failure is not None:
            raise self.failure
        return self.known

    def add(self, question: Question) -> None:
        self.added.append(question)


async def test_the_answer_to_another_question_is_given_and_never_kept_as_one_to_this(store: Store) -> None:
    similar, cache = Similar(), ExactCache(store, 60, 1000)
    flights = Flights(store, cache, similar)
    part, flight = await flights.find(asked("a"))
    assert part == "miss"
    assert isinstance(flight, Flight)
    with flights.led(flight):
        for delta in ANSWER.deltas():
            flight.add(delta)
    await flights.settled()
    assert similar.added == [asked("a")]
    similar.known = ANSWER
    part, flight = await flights.find(asked("c"), literally=True)
    assert part == "miss"
    assert isinstance(flight, Flight)
    with flights.led(flight):
        pass
    assert await flights.find(asked("b")) == ("semantic", ANSWER)
    await flights.settled()
    assert similar.added == [asked("a")]
    kept = await cache.of(asked("a"), asked("a").key)
    assert kept is not None
    assert kept.pieces == ANSWER.pieces
    assert await cache.of(asked("a"), asked("b").key) is None
    assert (await flights.find(asked("b")))[0] == "semantic"


async def test_who_goes_away_while_it_is_compared_leaves_the_question_to_others(store: Store) -> None:
    similar = Similar()
    flights = Flights(store, ExactCache(store, 60, 1000), similar)
    similar.failure = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await flights.find(asked("a"))
    await flights.settled()
    similar.failure = None
    part, flight = await flights.find(asked("a"))
    assert part == "miss"
    assert isinstance(flight, Flight)
    with flights.led(flight):
        pass
    await flights.settled()
