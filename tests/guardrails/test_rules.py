from __future__ import annotations

import time

import pytest

from gearshift.guardrails.chain import Chain, Link, make_chain
from gearshift.guardrails.rules import luhn, make_rule
from gearshift.guardrails.verdict import Span
from gearshift.platform.config import Policy, Rule

ALL = Policy(
    rules=[
        Rule(rule="secrets"),
        Rule(rule="email"),
        Rule(rule="card"),
        Rule(rule="blocklist", action="block", terms=["forbidden words", "never this"]),
    ]
)
CHAIN = make_chain(ALL, "output")
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK=\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to jo.doe+x@mail.example.co.uk now", "write to [REDACTED:email] now"),
        ("a@b.c is none, a@b.cc is one", "a@b.c is none, [REDACTED:email] is one"),
        ("card 4111 1111 1111 1111.", "card [REDACTED:card]."),
        ("card 4111-1111-1111-1112.", "card 4111-1111-1111-1112."),
        ("phone 0123456789", "phone 0123456789"),
        ("key sk-abcdefghijklmnopqrstuv done", "key [REDACTED:secrets] done"),
        ("AKIAIOSFODNN7EXAMPLE", "[REDACTED:secrets]"),
        ("ghp_" + "a1" * 18, "[REDACTED:secrets]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_d", "[REDACTED:secrets]"),
        (f"here {PEM} end", "here [REDACTED:secrets] end"),
        ("nothing to see", "nothing to see"),
        ("", ""),
    ],
)
def test_what_is_redacted_and_what_is_not(text: str, expected: str) -> None:
    assert CHAIN.check(text).text == expected


def test_a_block_wins_over_a_redaction_and_shows_no_text() -> None:
    verdict = CHAIN.check("jo@example.com says FORBIDDEN words")
    assert (verdict.action, verdict.text, verdict.rule) == ("block", "", "blocklist")


def test_luhn_by_hand() -> None:
    assert luhn("79927398713")  # the example of the Wikipedia article on the algorithm
    assert not luhn("79927398710")


class Raises:
    name = "broken"

    def find(self, text: str) -> list[Span]:
        raise RuntimeError("the rule is broken")

    def open_from(self, text: str) -> int:
        raise RuntimeError("the rule is broken")


def test_a_rule_that_can_t_run_blocks() -> None:
    verdict = Chain([Link(Raises(), "redact")]).check("anything")
    assert (verdict.action, verdict.rule) == ("block", "broken")


@pytest.mark.parametrize("rule", ["secrets", "email", "card", "blocklist"])
@pytest.mark.parametrize(
    "hostile", ["a" * 10**6, "1 " * 500_000, "a@" * 500_000, "eyJ" * 300_000, "-----BEGIN " * 90_000]
)
def test_hostile_input_takes_no_more_than_linear_time(rule: str, hostile: str) -> None:
    made = make_rule(rule, ["forbidden words"] if rule == "blocklist" else [])

    def seconds(text: str) -> float:
        begun = time.process_time()
        made.find(text)
        made.open_from(text)
        return time.process_time() - begun

    half, whole = min(seconds(hostile[: len(hostile) // 2]) for _ in range(3)), min(seconds(hostile) for _ in range(3))
    # twice the text takes about twice the time; a quadratic rule would take four times, and minutes
    assert whole < 3.2 * half + 0.05
