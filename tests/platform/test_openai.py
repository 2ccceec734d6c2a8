from __future__ import annotations

import json
from typing import Any

import pytest

from gearshift.platform.config import SamplingDefaults
from gearshift.platform.errors import InvalidRequest, UnsupportedParameter
from gearshift.platform.openai import ChatRequest, ChunkWriter, Identity, completion, parse_chat
from gearshift.platform.request import Delta, Message, ScoredToken, Usage

DEFAULTS = SamplingDefaults(temperature=0.3, max_completion_tokens=7)
HELLO = [{"role": "user", "content": "hello"}]


def parse(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "auto", "messages": HELLO, **fields}).encode())


def test_the_release_s_defaults_fill_in_what_the_request_leaves_out() -> None:
    sampling = parse().sampling(DEFAULTS)
    assert (sampling.temperature, sampling.max_tokens, sampling.top_p) == (0.3, 7, 1.0)


def test_the_request_s_wishes_come_first() -> None:
    sampling = parse(temperature=0, max_tokens=3, stop="END", top_k=-1, seed=5).sampling(DEFAULTS)
    assert (sampling.temperature, sampling.max_tokens, sampling.stop, sampling.top_k, sampling.seed) == (
        0,
        3,
        ("END",),
        0,
        5,
    )


def test_log_probabilities_are_told_as_openai_has_them() -> None:
    asked: list[dict[str, Any]] = [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}]
    assert [parse(**each).sampling(DEFAULTS).logprobs for each in asked] == [None, 0, 2]
    with pytest.raises(InvalidRequest, match="needs logprobs: true"):
        parse(top_logprobs=2)
    delta = Delta("é", "stop", Usage(1, 1), scored=(ScoredToken("é", -0.5, (("é", -0.5), ("e", -1.0))),))
    [choice] = json.loads(completion(Identity("i", "m", "f"), [delta]))["choices"]
    top = [{"token": "é", "logprob": -0.5, "bytes": [195, 169]}, {"token": "e", "logprob": -1.0, "bytes": [101]}]
    assert choice["logprobs"] == {"content": [top[0] | {"top_logprobs": top}], "refusal": None}
    [event, _] = ChunkWriter(Identity("i", "m", "f"), False).events(delta).decode().strip().split("\n\n")
    assert json.loads(event[6:])["choices"][0]["logprobs"] == choice["logprobs"]


def test_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse(messages=[{"role": "user", "content": parts}]).turns == (Message("user", "ab"),)


@pytest.mark.parametrize(
    "fields",
    [{"n": 1}, {"logprobs": False}, {"top_logprobs": 0},
     {"tools": []}, {"response_format": {"type": "text"}}, {"metadata": {"a": "b"}},
     {"logit_bias": None}, {"service_tier": "auto"}, {"prompt_cache_key": "k"}],
)  # fmt: skip
def test_values_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    parse(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"7": 1}},
        {"tools": [{}]},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"1": 2}},
    ],
)
def test_a_field_that_is_not_served_yet_is_named_and_not_ignored(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse(**fields)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert (caught.value.param or "").startswith(param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff"])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(body)


def events(*deltas: Delta, include_usage: bool) -> list[Any]:
    writer = ChunkWriter(Identity("chatcmpl-1", "release", "fp_1"), include_usage)
    raw = b"".join(writer.events(delta) for delta in deltas).decode()
    return [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n") if line]


def test_a_stream_begins_with_the_role_and_ends_with_the_finish_reason() -> None:
    chunks = events(Delta("a"), Delta("b"), Delta("", "stop", Usage(3, 2)), include_usage=False)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_comes_alone_and_last_when_asked_for() -> None:
    chunks = events(Delta("a", "length", Usage(3, 2, 1)), include_usage=True)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None, None]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 5
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize(
    ("fields", "service"),
    [({}, "interactive"), ({"service_tier": "auto"}, "interactive"), ({"service_tier": "priority"}, "interactive"),
     ({"service_tier": "flex"}, "batch"), ({"priority": 3}, "batch"), ({"priority": 0}, "interactive"),
     ({"priority": -1, "service_tier": "flex"}, "batch")],
)  # fmt: skip
def test_flex_and_a_priority_above_zero_are_batch_work(fields: dict[str, Any], service: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    assert parse_chat(json.dumps(body).encode()).service == service
