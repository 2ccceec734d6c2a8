"""One rank of a replica, for test_parallel.py: RANK PATH MEETING. The first says what it finds, a line of JSON each, and ends
when its input does."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

from gearshift.platform.config import Model
from gearshift.platform.engine.bridge import AsyncEngine
from gearshift.platform.engine.local import follow_rank, load_engine
from gearshift.platform.engine.parallel import Place
from gearshift.platform.errors import EngineUnavailable
from gearshift.platform.request import Request, SamplingParams

RANKS, VOCAB = 2, 256


def settings(**more: Any) -> Model:
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_memory": "300KiB"}
    given |= {"tensor_parallel": RANKS, "max_num_batched_tokens": 32, **more}
    return Model(source="x", **given)


def requests(count: int, longest: int = 60) -> list[Request]:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))) for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [Request(f"r{n}", (), params, prompt=prompt) for n, prompt in enumerate(prompts)]


async def answers(engine: AsyncEngine, asked: list[Request]) -> list[str]:
    async def answer(request: Request) -> str:
        async with aclosing(engine.generate(request)) as deltas:
            return "".join([delta.text async for delta in deltas])

    return await asyncio.gather(*(answer(request) for request in asked))


def say(told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


async def lead(path: Path, place: Place) -> None:
    engine = await asyncio.to_thread(load_engine, path, settings(), place)
    say(await answers(engine, requests(12)))
    say({"kv_blocks_used": engine.stats().kv_blocks_used, "preemptions": engine.stats().preemptions})
    endless = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    streams = [asyncio.create_task(fails(engine, Request(f"s{n}", (), endless, prompt=(5, 6, 7)))) for n in range(3)]
    done = engine.stats().generation_tokens
    while engine.stats().generation_tokens < done + 20:
        await asyncio.sleep(0.01)
    say("streaming")
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([ended, *streams], return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        messages = [await each for each in streams]
        messages.append(await fails(engine, Request("late", (), endless, prompt=(5,))))
        say({"messages": messages, "healthy": engine.healthy})
        await ended
    for each in streams:
        each.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await engine.close()


async def fails(engine: AsyncEngine, request: Request) -> str:
    while True:
        try:
            await answers(engine, [request])
        except EngineUnavailable as error:
            return error.message


if __name__ == "__main__":
    where = Place(int(sys.argv[1]), RANKS, sys.argv[3])
    if where.rank:
        follow_rank(Path(sys.argv[2]), settings(), where)
    else:
        asyncio.run(lead(Path(sys.argv[2]), where))
