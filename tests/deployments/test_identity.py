"""No two requests that could be answered differently are one question: every field is walked, and random ones are tried."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from gearshift.deployments.identity import HARMLESS_MODEL, HARMLESS_REQUEST, fingerprint, question
from gearshift.platform import config_file
from gearshift.platform.cache.exact import Question
from gearshift.platform.completions import Prompted
from gearshift.platform.config import Config, Model, SamplingDefaults
from gearshift.platform.openai import ChatRequest, Generation
from gearshift.platform.request import Message, SamplingParams

DEFAULTS = SamplingDefaults(temperature=0.0)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "m", "prompt": "Hi"}
OTHER: dict[str, Any] = {
    "messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
    "max_completion_tokens": 7,
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 1,
    "stop": "x",
    "stop_token_ids": [5],
    "min_tokens": 2,
    "ignore_eos": True,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "cache_salt": "s",
    "prompt": [1, 2],
}
"""Another value of each field that could change an answer."""
CONFIG = """
models: {m: {source: x, %s}}
prompts: {p: {system: "%s"}}
policies: {none: {}}
releases: {a: {model: m, prompt: p, policy: none}, b: {model: m, prompt: p, policy: none}}
tiers: {cheap: {release: a}}
tenants: {dev: {open: true}}
"""
OTHER_MODEL: dict[str, Any] = {
    "dtype": "float32",
    "quantization": "int8",
    "kv_cache_dtype": "float32",
    "model_impl": "transformers",
    "device": "cpu",
    "threads": 3,
    "tensor_parallel": 2,
    "accelerator_type": "H100",
    "max_model_len": 77,
    "block_size": 32,
}


def asked(
    body: Generation, tenant: str = "acme", release: str = "fp", judge: str = "", generation: int = 0
) -> Question:
    return question(tenant, "r", release, body, body.turns, body.sampling(DEFAULTS), judge, generation)


@pytest.mark.parametrize(("kind", "base"), [(ChatRequest, CHAT), (Prompted, TEXT)])
def test_every_field_of_a_request_is_told_apart_or_is_harmless(kind: type[Generation], base: dict[str, Any]) -> None:
    fields = set(kind.model_fields)
    assert fields <= set(OTHER) | set(HARMLESS_REQUEST), "a new field: could it change an answer?"
    first = asked(kind.model_validate(base)).key
    for name in fields - set(HARMLESS_REQUEST):
        changed = asked(kind.model_validate(base | {name: OTHER[name]}))
        assert changed.key != first, name


def test_every_field_of_what_an_engine_gets_is_told_apart() -> None:
    base = asked(ChatRequest.model_validate(CHAT))
    for field in dataclasses.fields(SamplingParams):
        value = getattr(base.sampling, field.name)
        other: Any = not value if isinstance(value, bool) else (9,) if isinstance(value, tuple) else (value or 0) + 1
        changed = dataclasses.replace(base.sampling, **{field.name: other})
        key = Question(base.tenant, base.name, base.release, base.messages, changed, base.salt).key
        assert key != base.key, field.name
    for name in ("role", "content", "name"):
        changes: Any = {name: "other"}
        said = dataclasses.replace(base.messages[0], **changes)
        assert Question(base.tenant, base.name, base.release, (said,), base.sampling, base.salt).key != base.key, name


def test_what_is_around_a_request_is_told_apart_however_it_is_spelled() -> None:
    body = ChatRequest.model_validate(CHAT)
    salted = ChatRequest.model_validate(CHAT | {"cache_salt": "judge"})
    told = [
        asked(body),
        asked(body, tenant="globex"),
        asked(body, release="fp2"),
        asked(body, judge="judge"),
        asked(salted),
        asked(body, generation=1),
        asked(Prompted.model_validate(TEXT)),
        asked(Prompted.model_validate(TEXT | {"prompt": [1]})),
    ]
    assert len({each.key for each in told}) == len(told)


def config(words: str = "dtype: bfloat16", system: str = "") -> Config:
    return config_file.parse(CONFIG % (words, system))


def test_every_setting_of_a_model_is_told_apart_or_is_harmless() -> None:
    fields = set(Model.model_fields)
    assert fields == set(OTHER_MODEL) | set(HARMLESS_MODEL), "a new setting: could it change an answer?"
    first = fingerprint(config(), "a", {"m": "1"})
    for name, value in OTHER_MODEL.items():
        changed = config(f"{name}: {str(value).lower() if isinstance(value, bool) else value}")
        assert fingerprint(changed, "a", {"m": "1"}) != first, name
    assert fingerprint(config(), "b", {"m": "1"}) != first
    assert fingerprint(config(), "a", {"m": "2"}) != first
    assert fingerprint(config(system="Be kind."), "a", {"m": "1"}) != first
    assert fingerprint(config("replicas: 3"), "a", {"m": "1"}) == first


def test_a_hundred_thousand_random_pairs_never_meet() -> None:
    """Of different tenants, releases or requests, with values from small sets, so that most of the rest is equal."""
    rng, known = random.Random(7), dict[str, Any]()
    texts = ["", "a", "b", "a\0b", "\0", "generation 1", "raw"]
    for _ in range(100_000):
        facts = (
            rng.choice(["acme", "acm", "globex"]),
            rng.choice(["r", "r2"]),
            rng.choice(["fp_1", "fp_2"]),
            tuple(Message(rng.choice(["user", "system"]), rng.choice(texts)) for _ in range(rng.randint(1, 2))),
            SamplingParams(temperature=0, max_tokens=rng.choice([None, 1, 2]), stop=tuple(rng.sample(texts, rng.randint(0, 1)))),
            rng.choice(texts),
            rng.random() < 0.5,
            rng.choice([None, (1,), (1, 2)]),
            rng.choice(texts),
            rng.choice([0, 1]),
        )  # fmt: skip
        assert known.setdefault(Question(*facts).key, facts) == facts
    assert len(known) > 10_000
