from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.guardrails.chain import make_chain
from gearshift.guardrails.documents import MOST_WITHIN, leaves
from gearshift.guardrails.subject import Subject
from gearshift.guardrails.tagger import Entity
from gearshift.platform.config import Policy

RULES = [{"rule": name} for name in ("secrets", "email", "card", "phone", "iban", "ssn", "ip")]
CHAIN = make_chain(Policy.model_validate({"rules": RULES}), "input")
PROTECTED = ["jo.doe@example.com", "4111 1111 1111 1111", "sk-abcdefghijklmnopqrstuvwx", "GB82 WEST 1234 5698 7654 32"]
WORDS = ["hello", "ünï", 'a "quoted" word', "back\\slash", "line\nbreak", "", "{", "[1]", "x: y,"]

texts = st.lists(st.sampled_from([*WORDS, *PROTECTED]), max_size=4).map(" ".join)
scalars = st.one_of(
    texts, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.just(4111111111111111)
)
inner = st.recursive(
    scalars, lambda each: st.lists(each, max_size=3) | st.dictionaries(texts, each, max_size=3), max_leaves=8
)
documents = st.dictionaries(st.sampled_from(["to", "text", "n"]), inner | inner.map(json.dumps), min_size=1)


def checked(text: str) -> str:
    return CHAIN.check_whole(Subject(text)).text


def keys(value: Any) -> Any:
    """What is left of a document without its scalars."""
    if isinstance(value, dict):
        return {key: keys(each) for key, each in value.items()}
    return [keys(each) for each in value] if isinstance(value, list) else None


def values(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [said for each in (value.values() if isinstance(value, dict) else value) for said in values(each)]
    if isinstance(value, str) and leaves(value) is not None:
        return values(json.loads(value))
    return [str(value)]


@settings(deadline=None)
@given(documents, st.booleans(), st.sampled_from([None, 1]))
def test_a_document_stays_one_with_its_keys_and_without_what_is_protected(
    document: Any, plain: bool, indent: int | None
) -> None:
    text = json.dumps(document, ensure_ascii=plain, indent=indent)
    left = json.loads(checked(text))
    assert keys(left) == keys(document)
    for said in values(left):
        assert not any(protected in said for protected in (*PROTECTED, "4111111111111111"))
    for before, after in zip(values(document), values(left), strict=True):
        if not any(char.isdigit() for char in before) and not any(each in before for each in PROTECTED):
            assert after == before


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('{"card": 4111111111111111, "n": 3}', '{"card": "[REDACTED:card]", "n": 3}'),
        ('{"to": "jo.doe@example.com"}', '{"to": "[REDACTED:email]"}'),
        ('{"to": "jo.doe\\u0040example.com"}', '{"to": "[REDACTED:email]"}'),
        ('["a", "b jo.doe@example.com"]', '["a", "b [REDACTED:email]"]'),
        ('{"jo.doe@example.com": 1}', '{"jo.doe@example.com": 1}'),
        ('{"say": "to jo.doe@example.com}', '{"say": "to [REDACTED:email]}'),
    ],
)
def test_only_values_change(text: str, left: str) -> None:
    assert checked(text) == left


def test_arguments_in_arguments_stay_arguments() -> None:
    text = json.dumps({"arguments": json.dumps({"to": 'jo.doe@example.com "x"', "n": [4111111111111111]})})
    assert json.loads(json.loads(checked(text))["arguments"]) == {
        "to": '[REDACTED:email] "x"',
        "n": ["[REDACTED:card]"],
    }


def test_names_within_arguments_are_taken_out() -> None:
    chain = make_chain(Policy.model_validate({"rules": [{"rule": "person"}]}), "input", "pypi:all-minilm-l6-v2")
    text = json.dumps({"arguments": json.dumps({"to": "Ann Lee", "other": "Bo"})})
    at = text.index("Ann Lee")
    verdict = chain.check_whole(Subject(text, entities=[Entity("person", at, at + 7)]))
    assert json.loads(json.loads(verdict.text)["arguments"]) == {"to": "[REDACTED:person]", "other": "Bo"}
    across = chain.check_whole(Subject(text, entities=[Entity("person", at, at + 12)]))
    assert "Ann Lee" not in across.text
    json.loads(across.text)


def test_of_many_documents_within_one_nothing_is_left_either() -> None:
    within = json.dumps({"to": "jo.doe@example.com"})
    left = json.loads(checked(json.dumps([within] * (MOST_WITHIN + 1) + ["plain"])))
    assert set(left[:-1]) == {"[REDACTED:email]"}
    assert left[-1] == "plain"


def test_many_values_are_each_looked_at() -> None:
    many = ["jo.doe@example.com", "plain", "line\nbreak", 'a "quote" to jo.doe@example.com'] * 5000
    left = json.loads(checked(json.dumps(many)))
    assert left == ["[REDACTED:email]", "plain", "line\nbreak", 'a "quote" to [REDACTED:email]'] * 5000


def test_what_is_no_document_has_no_leaves() -> None:
    assert leaves("plain") is None
    assert leaves('"a string"') is None
    assert leaves('{"torn": ') is None
    assert leaves("[" * 100_000) is None
