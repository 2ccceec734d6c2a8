from __future__ import annotations

import pytest

from gearshift.guardrails.chain import Chain, Link, make_chain
from gearshift.guardrails.patterns import Rule as RuleProtocol
from gearshift.guardrails.rules import Luhn, make_rule
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
        ("flat 12 4111 1111 1111 1111 7", "flat 12 [REDACTED:card] 7"),
        ("4111111111111111 5500 0000 0000 0004", "[REDACTED:card] [REDACTED:card]"),
        ("amex 3782 822463 10005", "amex [REDACTED:card]"),
        ("order 1234 5678 9012 3456", "order 1234 5678 9012 3456"),
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
    assert Luhn("79927398713").valid(0, 11)  # the example of the Wikipedia article on the algorithm
    assert not Luhn("79927398710").valid(0, 11)


def test_a_rule_that_can_t_run_blocks(broken: RuleProtocol) -> None:
    verdict = Chain([Link(broken, "redact")]).check("anything")
    assert (verdict.action, verdict.rule) == ("block", "broken")


@pytest.mark.parametrize("rule", ["secrets", "email", "card", "blocklist"])
@pytest.mark.parametrize(
    "hostile", ["a" * 10**6, "4 " * 50_000, "a@" * 500_000, "eyJ" * 300_000, "-----BEGIN " * 90_000]
)
def test_a_megabyte_of_hostile_text_is_decided(rule: str, hostile: str) -> None:
    made = make_rule(rule, ["forbidden words"] if rule == "blocklist" else [])
    assert made.find(hostile) == []  # a rule that is not linear in the text would not come back
    assert 0 <= made.open_from(hostile) <= len(hostile)


def test_check_digits_of_parts_are_those_of_the_parts() -> None:
    digits = "0041111111111111115500000000000004378282246310005"
    sums = Luhn(digits)
    for begin in range(len(digits)):
        for stop in range(begin + 1, len(digits) + 1):
            part = digits[begin:stop]
            by_hand = sum(
                int(d) if at % 2 == 0 else sum(map(int, str(2 * int(d)))) for at, d in enumerate(reversed(part))
            )
            assert sums.valid(begin, stop) == (by_hand % 10 == 0)
