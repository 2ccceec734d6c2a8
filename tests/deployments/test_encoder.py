"""Gateways and the encoder: batches, the wire between them, and what a request gets of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gearshift.deployments import registry
from gearshift.deployments.encoder import Batches, Encoder, EncoderServer, Floats, SimilarAnswers
from gearshift.deployments.registry import Member
from gearshift.deployments.wire import Add
from gearshift.guardrails import tagger
from gearshift.guardrails.tagger import Entity
from gearshift.platform.cache.exact import Answer, ExactCache, Question
from gearshift.platform.cache.store import Store
from gearshift.platform.config import Semantic
from gearshift.platform.request import Message, SamplingParams, Usage

pytestmark = pytest.mark.anyio

ANSWER = Answer(("Par", "is"), "stop", Usage(9, 2))


def question(text: str) -> Question:
    return Question("acme", "r", "fp", (Message("user", text),), SamplingParams(temperature=0), "")


class Known:
    """In the place of a `SemanticIndex`: whatever begins the same asks the same."""

    def __init__(self) -> None:
        self.keys: dict[tuple[str, str], str] = {}
        self.hang = asyncio.Event()
        self.hang.set()

    async def find(self, partition: str, text: str) -> str | None:
        await self.hang.wait()
        return self.keys.get((partition, text[:4]))

    async def add(self, partition: str, key: str, text: str, ttl_s: float) -> None:
        self.keys[partition, text[:4]] = key

    async def remove(self, partition: str, key: str) -> None:
        self.keys = {place: known for place, known in self.keys.items() if known != key}


def lengths(texts: Sequence[str]) -> list[Floats]:
    if "bad" in texts:
        raise ValueError("can't be read")
    return [np.array([len(text)], np.float32) for text in texts]


@asynccontextmanager
async def encoder(folder: Path, known: Any = None, read: Any = None) -> AsyncIterator[tuple[Encoder, EncoderServer]]:
    server, client = EncoderServer(Batches[Floats](lengths, 8), known, read and Batches(read, 8)), Encoder("")
    await server.start(folder / "encoder.sock")
    await client.meet([Member(name="e", model=registry.ENCODER, address=str(folder / "encoder.sock"))], "")
    try:
        yield client, server
    finally:
        client.close()
        await server.close()


async def test_what_arrives_while_a_batch_is_computed_is_the_next_one_and_nothing_is_computed_twice() -> None:
    seen: list[list[str]] = []
    go = threading.Event()

    def compute(texts: Sequence[str]) -> list[Floats]:
        seen.append(list(texts))
        go.wait()
        return lengths(texts)

    batches = Batches[Floats](compute, 3)
    asked = [asyncio.create_task(batches.of(text)) for text in ("a", "bb")]
    while not seen:
        await asyncio.sleep(0)
    asked += [asyncio.create_task(batches.of(text)) for text in ("ccc", "dddd", "a", "eeeee", "ffffff")]
    await asyncio.sleep(0)
    go.set()
    assert [float(vector[0]) for vector in await asyncio.gather(*asked)] == [1, 2, 3, 4, 1, 5, 6]
    assert seen == [["a", "bb"], ["ccc", "dddd", "eeeee"], ["ffffff"]]
    await batches.of("a")
    assert len(seen) == 3


async def test_a_text_that_can_t_be_computed_fails_its_batch_and_no_later_one() -> None:
    batches = Batches[Floats](lengths, 3)
    with pytest.raises(ValueError, match="can't be read"):
        await batches.of("bad")
    assert float((await batches.of("good"))[0]) == 4


async def test_entities_travel_and_what_is_too_long_is_not_read(tmp_path: Path) -> None:
    def read(texts: Sequence[str]) -> list[tuple[Entity, ...]]:
        return [(Entity("person", 0, len(text)),) for text in texts]

    async with encoder(tmp_path) as (client, _):
        assert await client.name("Ann", 2.0) is None
    async with encoder(tmp_path, read=read) as (client, _):
        assert await client.name("Ann", 2.0) == (Entity("person", 0, 3),)
        assert await client.name("a" * (tagger.MAX_CHARS + 1), 2.0) is None


async def test_vectors_and_keys_travel_and_no_answer_is_none(tmp_path: Path) -> None:
    known = Known()
    async with encoder(tmp_path, known) as (client, server):
        vector = await client.embed("four", 2.0)
        assert vector is not None
        assert vector.tolist() == [4.0]
        assert await client.embed("bad", 2.0) is None
        assert await client.find("p", "What is it?", 2.0) == ""
        client.tell(Add("p", "k", "What is it?", 60.0))
        assert await client.find("p", "What else?", 2.0) == "k"
        assert await client.find("q", "What else?", 2.0) == ""
        known.hang.clear()
        assert await client.find("p", "What else?", 0.01) is None  # too late
        waiting = asyncio.create_task(client.find("p", "What else?", 60.0))
        await asyncio.sleep(0)
        await server.close()
        assert await waiting is None
        assert not client.ready
    assert await client.find("p", "What else?", 60.0) is None  # nobody is there, and nobody waits


async def test_an_answer_that_is_gone_is_no_hit_and_is_forgotten(store: Store, tmp_path: Path) -> None:
    known, cache = Known(), ExactCache(store, 60, 1000)
    async with encoder(tmp_path, known) as (client, _):
        similar = SimilarAnswers(client, cache, Semantic(), 2.0, 60.0)
        first = question("What is the capital?")
        assert await similar.find(first) is None
        await cache.put(first, ANSWER)
        similar.add(first)
        assert await similar.find(question("What city is the capital?")) == ANSWER
        assert await similar.find(question("Who is it?")) is None
        await cache.purge()
        assert await similar.find(question("What city is the capital?")) is None
        assert await client.find(first.partition, "What", 2.0) == ""
        assert known.keys == {}
