from __future__ import annotations

from collections import Counter

import pytest

from gearshift.deployments.balance import CHUNK, LEAST_HELD, Held, Option, chain, choose, prompt_tokens
from gearshift.platform.request import Message, Request


def ask(text: str, tenant: str = "t", **more: str) -> Request:
    return Request("r", (Message("system", "S" * 2 * CHUNK), Message("user", text)), tenant=tenant, **more)  # type: ignore[arg-type]


def test_what_begins_the_same_shares_its_first_hashes_and_tenants_share_none() -> None:
    a, b = chain(ask("a" * 500)), chain(ask("b" * 500))
    same = [x == y for x, y in zip(a, b, strict=True)]
    assert same[:2] == [True, True]
    assert not any(same[2:])
    assert not set(a) & set(chain(ask("a" * 500, tenant="another")))
    assert not set(a) & set(chain(ask("a" * 500, cache_salt="mine")))
    assert chain(Request("r", (), prompt="x" * 300)) == chain(Request("r", (), prompt="x" * 301))
    assert chain(Request("r", (), prompt=(7,) * 300)) != chain(Request("r", (), prompt=(8,) * 300))
    assert chain(Request("r", (Message("user", "short"),))) == []


def test_what_was_sent_is_known_until_it_is_too_old() -> None:
    held, hashes = Held(), chain(ask("a" * 500))
    assert held.matched(hashes) == 0
    held.add(hashes, 0)
    assert held.matched(hashes) == len(hashes)
    assert held.matched(chain(ask("b" * 500))) == 2
    held.add([bytes([n]) for n in range(LEAST_HELD - 1)], 0)
    assert held.matched(hashes) == 0
    held.add(hashes, 100_000)
    assert held.matched(hashes) == len(hashes)


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ([Option(0), Option(0, matched=500), Option(0)], 1),
        ([Option(0), Option(400, matched=500), Option(0)], 1),
        ([Option(0), Option(600, matched=500), Option(700)], 0),
        ([Option(300), Option(100), Option(200)], 1),
        ([Option(0, streams=9), Option(0, streams=2), Option(0, streams=5)], 1),
        ([Option(0, matched=900), Option(0, matched=500, streams=1)], 0),
    ],
)
def test_the_one_that_begins_soonest_takes_it(options: list[Option], best: int) -> None:
    assert choose(options, 520, range(len(options)), b"key") == best


def test_equal_ones_share_evenly_and_the_same_beginning_goes_to_the_same() -> None:
    options = [Option(0)] * 3
    keys = [str(n).encode() for n in range(3000)]
    chosen = [choose(options, 100, "abc", key) for key in keys]
    assert all(900 < count < 1100 for count in Counter(chosen).values())
    fewer = [choose(options[:2], 100, "ab", key) for key in keys]  # one is gone: only its own move
    assert all(new == old for old, new in zip(chosen, fewer, strict=True) if old < 2)


def test_the_length_of_a_prompt_is_known_about() -> None:
    assert prompt_tokens(Request("r", (Message("user", "x" * 400),))) == 100
    assert prompt_tokens(Request("r", (), prompt=(1, 2, 3))) == 3
