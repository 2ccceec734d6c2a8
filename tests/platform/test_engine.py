"""The engine on a tiny model with random weights, against transformers' own `generate`: token for token."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize

from gearshift.platform.config import Model
from gearshift.platform.engine.blocks import BlockPool
from gearshift.platform.engine.bridge import AsyncEngine, Prompts
from gearshift.platform.engine.core import EngineCore
from gearshift.platform.engine.runner import Loaded, TorchRunner
from gearshift.platform.engine.scheduler import Scheduler
from gearshift.platform.engine.sequence import Sampled, Step, Token
from gearshift.platform.errors import ContextLengthExceeded, InternalError, Overloaded, ShuttingDown
from gearshift.platform.request import Delta, Message, Request, SamplingParams

pytestmark = pytest.mark.anyio

VOCAB, BLOCK, LONGEST = 256, 16, 200


class Characters:
    """A tokenizer whose token n is the character n + 0x100: every token is visible in the text."""

    @staticmethod
    def encode(request: Request) -> list[int]:
        if isinstance(request.prompt, tuple):
            return list(request.prompt)
        return [ord(character) - 0x100 for message in request.messages for character in message.content]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token + 0x100) for token in token_ids)


def tiny(kind: str, path: Path, **changes: Any) -> Path:
    """A random model of three layers, saved."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1,
        "pad_token_id": 0, "initializer_range": 0.4,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["Llama", "Qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Checked(Scheduler):
    """Looks for leaks after every step."""

    def update(self, step: Step, sampled: list[Sampled], seconds: float = 0.0) -> list[Token]:
        tokens = super().update(step, sampled, seconds)
        self.check_integrity()
        return tokens


def load(folder: Path, blocks: int = 128, budget: int = 64, **settings: Any) -> TorchRunner:
    settings = {"source": "x", "dtype": "float32", "device": "cpu", "max_num_batched_tokens": budget, **settings}
    model = Model(**settings, kv_cache_memory=ByteSize(1 << 30))
    return Loaded(folder, model, num_blocks=blocks).runner


def build(folder: Path, blocks: int = 128, seats: int = 8, budget: int = 64, queue: int = 64) -> AsyncEngine:
    core = EngineCore(Checked(BlockPool(blocks, BLOCK), seats, budget), load(folder, blocks, budget))
    return AsyncEngine(core, Prompts(Characters.encode, frozenset({2}), Characters()), LONGEST, queue)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    engine = build(folder)
    yield engine
    await engine.close()


def naive(reference: Any, prompt: list[int], length: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens[:-1] if tokens[-1] == 2 else tokens  # the end-of-text token has no text


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def ask(name: str, prompt: list[int], **sampling: Any) -> Request:
    text = "".join(chr(token + 0x100) for token in prompt)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **sampling})
    return Request(name, (Message("user", text),), params)


async def answer(engine: AsyncEngine, request: Request) -> list[Delta]:
    return [delta async for delta in engine.generate(request)]


def tokens(deltas: list[Delta]) -> list[int]:
    return [ord(character) - 0x100 for delta in deltas for character in delta.text]


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_greedy_equals_generate_alone_and_batched(engine: AsyncEngine, reference: Any) -> None:
    asked = prompts(12)
    expected = [naive(reference, prompt, 40) for prompt in asked]
    alone = [tokens(await answer(engine, ask(f"a{n}", prompt))) for n, prompt in enumerate(asked[:3])]
    assert alone == expected[:3]
    together = await asyncio.gather(*(answer(engine, ask(f"b{n}", prompt)) for n, prompt in enumerate(asked)))
    assert [tokens(deltas) for deltas in together] == expected
    assert engine.stats().kv_blocks_used == 0


async def test_greedy_equals_generate_across_chunks_and_preemption(folder: Path, reference: Any) -> None:
    engine = build(folder, blocks=13, budget=16)
    asked = prompts(8)
    together = await asyncio.gather(*(answer(engine, ask(f"{n}", prompt)) for n, prompt in enumerate(asked)))
    assert [tokens(deltas) for deltas in together] == [naive(reference, prompt, 40) for prompt in asked]
    assert engine.stats().preemptions > 0
    await engine.close()


def score(name: str, prompt: list[int], **more: Any) -> Request:
    return Request(
        name, (), SamplingParams(**{"temperature": 0.0, "max_tokens": 1, "logprobs": 2, "echo": True, **more}),
        prompt=tuple(prompt),
    )  # fmt: skip


def logprobs(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), dim=-1)
    return found


@pytest.mark.parametrize("shape", [{}, {"blocks": 13, "budget": 16}])
async def test_each_token_of_a_prompt_is_told_with_its_probability(
    folder: Path, reference: Any, shape: dict[str, int]
) -> None:
    engine = build(folder, **shape)
    asked = [[7] * 20 + prompt for prompt in prompts(8)]  # the same beginning: what is cached must be computed again
    beside = [answer(engine, ask(f"s{n}", prompt)) for n, prompt in enumerate(asked)]
    both = await asyncio.gather(*(answer(engine, score(f"{n}", prompt)) for n, prompt in enumerate(asked)), *beside)
    for prompt, (echo, last), streamed in zip(asked, both[:8], both[8:], strict=True):
        truth = logprobs(reference, prompt)
        assert (echo.echo, echo.tokens, tokens([echo])) == (True, 0, prompt)
        assert [ord(token.text) - 0x100 for token in echo.scored] == prompt
        assert echo.scored[0].logprob is None
        for place, token in enumerate(echo.scored[1:], 1):
            assert token.logprob == pytest.approx(float(truth[place - 1, prompt[place]]), abs=1e-3)
            best = float(truth[place - 1].max())
            assert token.top[0][1] == pytest.approx(best, abs=1e-3)
            assert token.text in [text for text, _ in token.top]
        assert (last.usage and last.usage.prompt_tokens, last.usage and last.usage.cached_tokens) == (len(prompt), 0)
        assert tokens(streamed) == naive(reference, prompt, 40)
        [token] = last.scored  # also where it is the end-of-text token: harnesses count on one more than the prompt has
        assert token.logprob == pytest.approx(float(truth[-1].max()), abs=1e-3)
        assert token.ends == (not last.text)
    assert engine.stats().kv_blocks_used == 0
    await engine.close()


async def test_each_token_of_an_answer_is_told_with_its_probability(engine: AsyncEngine, reference: Any) -> None:
    prompt = prompts(1)[0]
    deltas = await answer(engine, ask("x", prompt, logprobs=0))
    scored = [token for delta in deltas for token in delta.scored if not token.ends]
    assert [ord(token.text) - 0x100 for token in scored] == tokens(deltas)
    truth = logprobs(reference, prompt + tokens(deltas))
    for place, token in enumerate(scored, len(prompt)):
        assert token.logprob == pytest.approx(float(truth[place - 1].max()), abs=1e-3)
        assert token.top == ()


async def test_a_seeded_answer_does_not_depend_on_its_neighbours(engine: AsyncEngine) -> None:
    seeded = {"temperature": 1.0, "top_p": 0.9, "seed": 11}
    prompt, *others = prompts(6)
    alone = tokens(await answer(engine, ask("alone", prompt, **seeded)))
    crowd = [answer(engine, ask(f"{n}", other, temperature=1.0)) for n, other in enumerate(others)]
    beside, *_ = await asyncio.gather(answer(engine, ask("beside", prompt, **seeded)), *crowd)
    assert tokens(beside) == alone
    assert tokens(await answer(engine, ask("other", prompt, temperature=1.0, seed=12))) != alone


async def test_usage_and_finish_reasons(engine: AsyncEngine, reference: Any) -> None:
    prompt = prompts(1)[0]
    last = (await answer(engine, ask("length", prompt, max_tokens=5, ignore_eos=True)))[-1]
    assert last.finish_reason == "length"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt), 5)
    greedy = naive(reference, prompt, 10)
    stopped = await answer(engine, ask("stop", prompt, stop_token_ids=(greedy[3],)))
    assert stopped[-1].finish_reason == "stop"
    assert tokens(stopped) == greedy[: greedy.index(greedy[3])]


async def test_a_stop_string_over_two_tokens_ends_the_answer(engine: AsyncEngine, reference: Any) -> None:
    prompt = prompts(3)[2]
    greedy = naive(reference, prompt, 20)
    stop = "".join(chr(token + 0x100) for token in greedy[4:6])
    deltas = await answer(engine, ask("s", prompt, stop=(stop,)))
    text = "".join(delta.text for delta in deltas)
    assert text == "".join(chr(token + 0x100) for token in greedy).partition(stop)[0]
    assert deltas[-1].finish_reason == "stop"
    await until(lambda: engine.stats().running == 0)
    assert engine.stats().kv_blocks_used == 0


async def test_what_does_not_fit_the_context_is_refused_and_not_cut(engine: AsyncEngine) -> None:
    with pytest.raises(ContextLengthExceeded, match="holds 200 tokens, but the request needs 200"):
        await answer(engine, ask("long", [5] * LONGEST))
    with pytest.raises(ContextLengthExceeded, match="and 50 for the answer"):
        await answer(engine, ask("long", [5] * 160, max_tokens=50))
    assert engine.stats().steps == 0
    fitted = await answer(engine, ask("fit", [5] * 195, max_tokens=50, fit_context=True, ignore_eos=True))
    assert len(tokens(fitted)) == 5


async def test_what_would_not_fit_the_whole_cache_is_refused(folder: Path) -> None:
    engine = build(folder, blocks=4)
    with pytest.raises(ContextLengthExceeded, match="holds 64 tokens"):
        await answer(engine, ask("large", [5] * 70))
    assert len(tokens(await answer(engine, ask("fits", [5] * 40, max_tokens=24, ignore_eos=True)))) == 24
    await engine.close()


async def test_without_a_limit_the_answer_may_fill_the_context(engine: AsyncEngine) -> None:
    last = (await answer(engine, ask("fill", [5] * 190, max_tokens=None, ignore_eos=True)))[-1]
    assert last.usage is not None
    assert last.usage.total_tokens == LONGEST


async def test_an_abandoned_answer_stops_within_two_steps_and_frees_its_blocks(engine: AsyncEngine) -> None:
    async with aclosing(engine.generate(ask("gone", [5] * 20, max_tokens=150, ignore_eos=True))) as deltas:
        await anext(deltas)
        assert engine.stats().kv_blocks_used > 0
    seen = engine.stats().steps
    await until(lambda: engine.stats().aborted == 1)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.steps <= seen + 2 + 1  # the count seen may be one delivery old
    await asyncio.sleep(0.05)
    assert engine.stats().steps == stats.steps


async def test_an_abandoned_answer_that_still_waits_leaves_the_queue(folder: Path) -> None:
    engine = build(folder, seats=1)
    running = asyncio.create_task(answer(engine, ask("running", [5] * 20, max_tokens=150, ignore_eos=True)))
    await until(lambda: engine.stats().running == 1)
    waiting = asyncio.create_task(answer(engine, ask("waiting", [6] * 20)))
    await until(lambda: engine.stats().waiting == 1)
    waiting.cancel()
    await until(lambda: engine.stats().aborted == 1)
    assert engine.stats().waiting == 0
    assert len(tokens(await running)) == 150
    await engine.close()


async def test_an_abandoned_answer_that_is_still_prefilling_frees_its_blocks(folder: Path) -> None:
    engine = build(folder, budget=2)
    task = asyncio.create_task(answer(engine, ask("prefilling", [5] * 150)))
    await until(lambda: engine.stats().kv_blocks_used > 2)
    assert engine.stats().generation_tokens == 0
    task.cancel()
    await until(lambda: engine.stats().aborted == 1)
    assert engine.stats().kv_blocks_used == 0
    await engine.close()


async def test_over_the_bound_the_queue_refuses(folder: Path) -> None:
    engine = build(folder, seats=1, queue=1)
    tasks = [
        asyncio.create_task(answer(engine, ask(f"{n}", [5] * 20, max_tokens=100, ignore_eos=True))) for n in range(3)
    ]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert len(refused) == 1
    assert refused[0].retry_after_s is not None
    assert sum(isinstance(result, list) for result in results) == 2
    await engine.close()


class Breaking:
    """Raises on the steps it is told to, else runs."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner, self.broken = runner, False

    def run(self, step: Step) -> list[Sampled]:
        if self.broken:
            self.broken = False
            raise RuntimeError("CUDA error: at /internal/path")
        return self.runner.run(step)

    def close(self) -> None:
        self.runner.close()


async def test_a_step_that_raises_fails_its_requests_and_no_others(folder: Path, reference: Any) -> None:
    engine = build(folder)
    engine._core.runner = breaking = Breaking(engine._core.runner)  # type: ignore[arg-type]
    prompt = prompts(1)[0]
    breaking.broken = True
    with pytest.raises(InternalError) as caught:
        await answer(engine, ask("unlucky", prompt))
    assert "CUDA" not in caught.value.message
    assert tokens(await answer(engine, ask("next", prompt))) == naive(reference, prompt, 40)
    assert engine.stats().kv_blocks_used == 0
    assert engine.healthy
    await engine.close()


async def test_text_that_can_not_be_made_fails_its_own_request_only(folder: Path, reference: Any) -> None:
    engine = build(folder)

    class Broken(Characters):
        def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
            raise ValueError("no such id")

    good = engine._prompts
    engine._prompts = Prompts(Characters.encode, frozenset({2}), Broken())
    with pytest.raises(InternalError):
        await answer(engine, ask("unreadable", [5] * 20, max_tokens=150, ignore_eos=True))
    await until(lambda: engine.stats().running == 0)
    engine._prompts = good
    prompt = prompts(1)[0]
    assert tokens(await answer(engine, ask("next", prompt))) == naive(reference, prompt, 40)
    await engine.close()


async def test_a_prompt_seen_before_is_told_as_cached_and_answers_the_same(engine: AsyncEngine) -> None:
    prompt = prompts(1, longest=90)[0] + [7] * 40
    first, again = [await answer(engine, ask(name, prompt)) for name in ("first", "again")]
    assert tokens(first) == tokens(again)
    assert [deltas[-1].usage.cached_tokens for deltas in (first, again)] == [0, (len(prompt) - 1) // BLOCK * BLOCK]  # type: ignore[union-attr]
    stranger = replace(ask("stranger", prompt), tenant="another")
    salted = replace(ask("salted", prompt), cache_salt="mine")
    for request in (stranger, salted):
        usage = (await answer(engine, request))[-1].usage
        assert usage is not None
        assert usage.cached_tokens == 0


async def test_closing_ends_what_runs(folder: Path) -> None:
    engine = build(folder)
    task = asyncio.create_task(answer(engine, ask("x", [5] * 20, max_tokens=150, ignore_eos=True)))
    await until(lambda: engine.stats().running == 1)
    await engine.close()
    with pytest.raises(ShuttingDown):
        await task
    with pytest.raises(ShuttingDown):
        await answer(engine, ask("y", [5]))


async def test_a_request_that_is_still_being_read_when_the_engine_ends_is_told_so(folder: Path) -> None:
    engine = build(folder)
    reading, ended = threading.Event(), threading.Event()

    def encode(request: Request) -> list[int]:
        reading.set()
        ended.wait(10)
        return Characters.encode(request)

    engine._prompts = Prompts(encode, frozenset(), Characters())
    task = asyncio.create_task(answer(engine, ask("late", [5])))
    await until(reading.is_set)
    await engine.close()
    ended.set()
    with pytest.raises(ShuttingDown):
        await asyncio.wait_for(task, 10)


@pytest.mark.parametrize(
    "sampling",
    [
        {"ignore_eos": True},
        {"temperature": 1.0, "top_p": 0.9, "seed": 11, "ignore_eos": True},
        {"frequency_penalty": 1.0, "ignore_eos": True},
        {"stop": ("never", chr(0x100 + 77) + chr(0x100 + 78))},
    ],
)
async def test_an_answer_goes_on_elsewhere_as_it_would_have(folder: Path, sampling: dict[str, Any]) -> None:
    prompt = prompts(2)[1]
    here, there = build(folder), build(folder)
    whole = await answer(here, ask("whole", prompt, **sampling))
    for cut in (1, 7, len(whole) - 1):
        begun = whole[:cut]
        ids = tuple(token for delta in begun for token in delta.ids)
        sent = sum(len(delta.text) for delta in begun)
        asked = replace(ask(f"rest {cut}", prompt, **sampling), resume=ids, sent=sent)
        rest = await answer(there, asked)
        assert "".join(delta.text for delta in begun + rest) == "".join(delta.text for delta in whole)
        assert (rest[-1].finish_reason, rest[-1].usage and rest[-1].usage.completion_tokens) == (
            whole[-1].finish_reason,
            whole[-1].usage and whole[-1].usage.completion_tokens,
        )
    assert there.stats().kv_blocks_used == 0
    await here.close()
    await there.close()
