from __future__ import annotations

import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.guardrails.credentials import Secrets, entropy, random_like

FORMS, NAMED = Secrets(), Secrets(named=True)
VALUE = "q7Rk2mXv9TzLw4Bn"


@pytest.mark.parametrize(
    "text",
    [
        f"acmeToken = '{VALUE}'",
        f"export ACME_API_KEY={VALUE}",
        f"acme_secret: {VALUE}",
        f'{{"password": "{VALUE}"}}',
        f"Here is my acme key: {VALUE} please use it.",
        f"curl -u jo:{VALUE} https://acme.example",
        f"Authorization: Bearer {VALUE}",
        f"postgres://jo:{VALUE}@db.example/x",
        "token: 915276079559418839",
    ],
)
def test_a_value_that_is_called_a_secret_is_one(text: str) -> None:
    found = NAMED.find(text)
    assert any(VALUE in text[s.start : s.end] or "915276" in text[s.start : s.end] for s in found)
    assert not FORMS.find(text)


@pytest.mark.parametrize(
    "text",
    [
        "The key: understanding the problem first",
        "My password is too long to remember",
        "api_key = your_api_key_here_123",
        "token: xxxxxxxxxxxxxxxx12",
        "password: ${DB_PASSWORD_2}",
        "access in 2024, key 12345",
        "https://docs.example.com/authentication/token/overview",
        "a secret: meet me at the bridge at noon",
    ],
)
def test_words_and_placeholders_are_none(text: str) -> None:
    assert NAMED.find(text) == []


def test_entropy_is_of_the_characters() -> None:
    assert entropy("aaaa") == 0
    assert entropy("abcd") == pytest.approx(2)
    assert entropy("aabb") == pytest.approx(1)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_most_generated_strings_look_random(seed: int) -> None:
    drawn = random.Random(seed)
    values = ["".join(drawn.choices(string.ascii_letters + string.digits, k=24)) for _ in range(20)]
    assert sum(map(random_like, values)) >= 10
