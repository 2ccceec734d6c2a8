from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.guardrails.chain import Chain, Link, make_chain
from gearshift.guardrails.patterns import Rule as RuleProtocol
from gearshift.guardrails.stream import WINDOW_CHARS, Window, watch
from gearshift.guardrails.verdict import Verdict
from gearshift.platform.config import Policy, Rule
from gearshift.platform.request import Delta, Usage

pytestmark = pytest.mark.anyio

NAMES = ("secrets", "email", "card", "phone", "iban", "ssn", "ip")
REDACTING = Policy(rules=[Rule.model_validate({"rule": name}) for name in NAMES])
CHAIN = make_chain(REDACTING, "output")
PROTECTED = [
    "jo.doe@example.com",
    "4111 1111 1111 1111",
    "4111-1111-1111-1111",
    "sk-abcdefghijklmnopqrstuvwx",
    "AKIAIOSFODNN7EXAMPLE",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcdef",
    "-----BEGIN PRIVATE KEY-----\nMIIE\nvgIB\n-----END PRIVATE KEY-----",
    "+44 20 7946 0958",
    "(650) 636-4884",
    "GB82 WEST 1234 5698 7654 32",
    "DE89370400440532013000",
    "078-05-1120",
    "192.168.10.20",
    "2001:db8::ff00:42:8329",
]
WORDS = [
    "hello",
    " ",
    "\n",
    ", ",
    "a@b",
    "12",
    "4111 11",
    "sk-",
    "ünï",
    "-----BEGIN ",
    "@",
    ".",
    "GB",
    "82 ",
    "+",
    "x",
    ":",
    "-",
]


def pieces(text: str, data: st.DataObject) -> list[str]:
    cut: list[str] = []
    while text:
        size = data.draw(st.integers(1, min(len(text), 12)))
        cut.append(text[:size])
        text = text[size:]
    return cut


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from([*WORDS, *PROTECTED]), max_size=12), st.data())
def test_a_stream_says_what_the_whole_text_would_say_however_it_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = CHAIN.check(text).text
    window = Window(CHAIN)
    sent = ""
    for piece in pieces(text, data):
        sent += window.push(piece).text
        assert whole.startswith(sent)
    assert sent + window.flush().text == whole


@settings(deadline=None)
@given(st.integers(300, 700), st.integers(1, 9))
def test_a_run_without_end_is_not_held_for_ever(length: int, size: int) -> None:
    window = Window(CHAIN)
    sent = "".join(window.push("x" * size).text for _ in range(length // size))
    assert len(sent) >= length // size * size - WINDOW_CHARS


@pytest.mark.parametrize(
    "secret",
    [
        "sk-" + "a1B2" * 300,
        "eyJ" + "hbG1" * 44 + ".eyJ" + "x9Y_" * 300,
        "-----BEGIN PRIVATE KEY-----\n" + ("MIIEv" * 12 + "\n") * 20 + "-----END PRIVATE KEY-----",
        "SG." + "a1B2" * 9 + "." + "c3D4" * 100,
    ],
)
@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 40))
def test_a_secret_of_any_length_is_held_within_the_window_and_never_said(secret: str, size: int) -> None:
    text = f"see {secret} there"
    window, sent, held = Window(CHAIN), "", 0
    for at in range(0, len(text), size):
        sent += window.push(text[at : at + size]).text
        held = max(held, window.held)
    assert sent + window.flush().text == CHAIN.check(text).text == "see [REDACTED:secrets] there"
    assert held <= WINDOW_CHARS


def test_plain_words_wait_for_the_end_of_their_word_only() -> None:
    window = Window(CHAIN)
    assert [window.push(piece).text for piece in ("Hel", "lo", " world", ".", " ")] == ["", "", "Hello ", "", "world. "]


async def source(*pieces: str, closed: list[bool] | None = None) -> AsyncGenerator[Delta, None]:
    try:
        for piece in pieces:
            yield Delta(piece)
        yield Delta("", "stop", Usage(1, len(pieces)))
    finally:
        if closed is not None:
            closed.append(True)


async def test_a_block_ends_the_stream_and_closes_what_is_below() -> None:
    chain = make_chain(Policy(rules=[Rule(rule="blocklist", action="block", terms=["forbidden words"])]), "output")
    closed: list[bool] = []
    notes: list[Verdict] = []
    deltas = [
        delta
        async for delta in watch(
            source("fine ", "forb", "idden wo", "rds", " more", closed=closed), chain, notes.append
        )
    ]
    assert "".join(delta.text for delta in deltas) == "fine "
    assert deltas[-1].finish_reason == "content_filter"
    assert closed == [True]
    assert [note.rule for note in notes] == ["blocklist"]


async def test_what_is_held_at_the_end_is_sent_with_the_finish_reason() -> None:
    deltas = [delta async for delta in watch(source("mail jo@exam", "ple.com"), CHAIN, lambda _: None)]
    assert "".join(delta.text for delta in deltas) == "mail [REDACTED:email]"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].usage == Usage(1, 2)


async def test_a_rule_that_raises_lets_nothing_out(broken: RuleProtocol) -> None:
    deltas = [delta async for delta in watch(source("secret"), Chain([Link(broken, "redact")]), lambda _: None)]
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("", "content_filter")]


async def test_without_anybody_to_hold_it_what_a_human_has_to_look_at_is_blocked() -> None:
    chain = make_chain(Policy.model_validate({"rules": [{"rule": "email", "action": "review"}]}), "output")

    async def deltas() -> AsyncGenerator[Delta, None]:
        yield Delta("write to jo.doe@example.com ")
        yield Delta("now", "stop", Usage(1, 2))

    found = [delta async for delta in watch(deltas(), chain, lambda _: None)]
    assert [delta.finish_reason for delta in found] == [None, "content_filter"][-len(found) :]
    assert "jo.doe" not in "".join(delta.text for delta in found)
