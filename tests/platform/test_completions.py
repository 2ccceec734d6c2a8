from __future__ import annotations

import json
from typing import Any

import pytest

from gearshift.platform.completions import CompletionWriter, completion, parse_completions
from gearshift.platform.config import SamplingDefaults
from gearshift.platform.errors import InvalidRequest
from gearshift.platform.openai import Identity
from gearshift.platform.request import Delta, Message, ScoredToken, Usage

DEFAULTS = SamplingDefaults(temperature=0.3, max_completion_tokens=7)
WHO = Identity("cmpl-1", "m", "fp", created=5)
ECHO = Delta("ab", tokens=0, scored=(ScoredToken("a"), ScoredToken("b", -0.5, (("c", -0.1), ("b", -0.5)))), echo=True)
SAID = Delta("c", "length", Usage(2, 1), scored=(ScoredToken("c", -0.2, (("c", -0.2),)),))


def parse(prompt: Any = "ab", **fields: Any) -> Any:
    return parse_completions(json.dumps({"model": "m", "prompt": prompt, **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("ab", [("ab", None)]),
        ([1, 2], [("", (1, 2))]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([[1], [2, 3]], [("", (1,)), ("", (2, 3))]),
    ],
)
def test_prompts_are_text_or_tokens_one_or_many(prompt: Any, found: list[Any]) -> None:
    bodies = parse(prompt, seed=4)
    assert [(body.turns, body.token_ids) for body in bodies] == [((Message("user", t),), ids) for t, ids in found]
    assert all(body.raw and body.seed == 4 for body in bodies)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, "single prompt"),
        ({"max_tokens": 0}, "set echo: true"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_can_not_be_served_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parse(**fields)


def test_lengths_are_as_openai_has_them() -> None:
    [body], [none], [long] = parse(), parse(max_tokens=0, echo=True), parse(max_tokens=99, echo=True)
    assert [each.sampling(DEFAULTS).max_tokens for each in (body, none, long)] == [16, 1, 99]
    assert [each.sampling(DEFAULTS).echo for each in (body, none, long)] == [False, True, True]
    assert body.sampling(DEFAULTS).temperature == 0.3


def test_a_body_has_four_lists_of_log_probabilities() -> None:
    found = json.loads(completion(WHO, parse(echo=True, logprobs=1), [[ECHO, SAID]]))
    assert found["object"] == "text_completion"
    [choice] = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -0.5, -0.2],
        "top_logprobs": [None, {"c": -0.1, "b": -0.5}, {"c": -0.2}],
        "text_offset": [0, 1, 2],
    }
    assert found["usage"]["total_tokens"] == 3


def test_nothing_is_told_of_an_answer_that_nobody_wanted() -> None:
    found = json.loads(completion(WHO, parse(echo=True, logprobs=1, max_tokens=0), [[ECHO, SAID]]))
    assert (found["choices"][0]["text"], found["usage"]["completion_tokens"]) == ("ab", 0)
    assert found["choices"][0]["logprobs"]["tokens"] == ["a", "b"]


def test_choices_of_several_prompts_are_numbered_through() -> None:
    answers = [[Delta(f"{p}{n}", "stop", Usage(1, 1), choice=n) for n in range(2)] for p in "xy"]
    found = json.loads(completion(WHO, parse(["x", "y"], n=2), answers))
    assert [(each["index"], each["text"]) for each in found["choices"]] == [(0, "x0"), (1, "x1"), (2, "y0"), (3, "y1")]


def test_events_tell_the_same() -> None:
    [body] = parse(echo=True, logprobs=1, stream_options={"include_usage": True})
    writer = CompletionWriter(WHO, body)
    events = [json.loads(line[6:]) for d in (ECHO, SAID) for line in writer.events(d).decode().split("\n\n") if line]
    assert "".join(each["text"] for event in events for each in event["choices"]) == "abc"
    assert events[1]["choices"][0]["logprobs"]["text_offset"] == [2]
    assert (events[-1]["choices"], events[-1]["usage"]["prompt_tokens"]) == ([], 2)
