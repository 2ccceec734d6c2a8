from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.guardrails.personal import Accounts, Machines, Phones, SocialSecurity, mod97


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("ring +44 20 7946 0958 now", "+44 20 7946 0958"),
        ("at (650) 636-4884.", "(650) 636-4884"),
        ("650-636-4884 x123", "650-636-4884 x123"),
        ("Phone: 05334 75 83 35", "05334 75 83 35"),
        ("you can call 33 93 31", "33 93 31"),
        ("mobile (35) 609-270", "(35) 609-270"),
    ],
)
def test_phone_numbers_by_their_form_or_their_name(text: str, number: str) -> None:
    assert [text[s.start : s.end].strip("(") for s in Phones(named=True).find(text)] == [number.strip("(")]


@pytest.mark.parametrize(
    "text",
    [
        "in 2024-05-01 and 1/30/1950",
        "my number is 078-05-1120",
        "order 33 93 31",
        "id91480041",
        "at 192.168.10.20",
        "call me in 2024",
        "4111 1111 1111 1111",
        "2019 - 2021",
    ],
)
def test_dates_and_other_numbers_are_no_phones(text: str) -> None:
    assert Phones(named=True).find(text) == []


@settings(deadline=None)
@given(st.integers(0, 10**18 - 1), st.sampled_from(["GB", "DE", "FR"]), st.booleans())
def test_an_account_number_has_a_right_checksum(digits: int, country: str, spaced: bool) -> None:
    body = f"{digits:018}"
    check = 98 - int("".join(str(int(c, 36)) for c in f"{body}{country}00")) % 97
    number = f"{country}{check:02}{body}"
    wrong = f"{country}{(check % 97) + 1:02}{body}"
    assert mod97(number)
    shown = " ".join(number[at : at + 4] for at in range(0, len(number), 4)) if spaced else number
    found = Accounts().find(f"my iban is {shown} now")
    assert [f"my iban is {shown} now"[s.start : s.end] for s in found] == [shown]
    assert mod97(wrong) == (wrong == number)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from 10.0.35.11 to 2001:db8::ff00:42:8329", ["10.0.35.11", "2001:db8::ff00:42:8329"]),
        ("version 3.4.2.999 at std::vector or a::", []),
        ("12:30:45 and 1.2.3", []),
        ("call 01.84.17.61.18", []),
    ],
)
def test_addresses_of_machines(text: str, found: list[str]) -> None:
    assert [text[s.start : s.end] for s in Machines().find(text)] == found


def test_social_security_numbers() -> None:
    text = "078-05-1120, 000-12-3456, 1078-05-1120, 078-05-11201"
    assert [text[s.start : s.end] for s in SocialSecurity().find(text)] == ["078-05-1120"]
