"""Pairs of questions with a label, whether they ask the same: read from files, or made up to be as hard as they can be.

What is made up looks alike and asks something else. Every kind has templates of its own, filled by a seed.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gearshift.platform.errors import InvalidRequest

PLACES = ["Lisbon", "Hanoi", "Quito", "Dublin", "Osaka", "Accra", "Turin", "Bergen", "Tunis", "Kyoto", "Malmo", "Perth"]
FIRMS = [
    "Volvo",
    "Nokia",
    "Bosch",
    "Canon",
    "Adidas",
    "Philips",
    "Ericsson",
    "Fiat",
    "Lenovo",
    "Garmin",
    "Sony",
    "Miele",
]
PEOPLE = [
    "my manager",
    "my tenant",
    "a customer",
    "my neighbour",
    "the bank",
    "our supplier",
    "a contractor",
    "the insurer",
]
DRUGS = ["naproxen", "metformin", "codeine", "warfarin", "insulin", "lithium", "morphine", "diazepam"]
ANIMALS = ["hens", "goats", "ferrets", "snakes", "geese", "donkeys", "lizards", "ponies"]
MONEY = ["dirhams", "zloty", "forints", "kroner", "lira", "rand", "pesetas", "shekels"]
LANGUAGES = ["Finnish", "Greek", "Dutch", "Tamil", "Welsh", "Czech", "Arabic", "Turkish"]
TOOLS = ["tar", "grep", "curl", "rsync", "ssh", "find"]


class Labelled(NamedTuple):
    """Two questions, and whether the answer to one does for the other. kind: of one that was made up."""

    one: str
    other: str
    same: bool
    kind: str = ""


Fill = Callable[[random.Random], tuple[str, str]]


def _two(pool: Sequence[str], template: str, reverse: str | None = None) -> Fill:
    """Two of a pool, and the two changed about."""

    def fill(rng: random.Random) -> tuple[str, str]:
        a, b = rng.sample(pool, 2)
        return template.format(a=a, b=b), (reverse or template).format(a=b, b=a)

    return fill


def _another(pool: Sequence[str], template: str) -> Fill:
    """One of a pool, and another one."""

    def fill(rng: random.Random) -> tuple[str, str]:
        a, b = rng.sample(pool, 2)
        return template.format(a), template.format(b)

    return fill


def _number(template: str, low: int, high: int) -> Fill:
    return lambda rng: (lambda two: (template.format(two[0]), template.format(two[1])))(rng.sample(range(low, high), 2))


def _one(pool: Sequence[str], template: str, other: str) -> Fill:
    """The same filling in two templates."""

    def fill(rng: random.Random) -> tuple[str, str]:
        a = rng.choice(pool)
        return template.format(a), other.format(a)

    return fill


KINDS: Mapping[str, Sequence[Fill]] = {
    "direction": [
        _two(MONEY, "What is the rate from {a} to {b}?"),
        _two(PLACES, "Which ferry goes from {a} to {b}?"),
        _two(PLACES, "how far is the drive from {a} to {b}"),
        _two(LANGUAGES, "Translate the sign from {a} into {b}"),
        _two(FIRMS, "Did {a} buy {b}?"),
        _two(FIRMS, "Why did {a} sue {b} last time?"),
        _two(PEOPLE, "Can {a} claim damages from {b}?"),
        _two(ANIMALS, "Do {a} eat {b}?"),
        _two(DRUGS, "How do I switch from {a} to {b}?"),
    ],
    "number": [
        _number("What is {} plus 17?", 20, 400),
        _number("How many calories do {} eggs have?", 2, 30),
        _number("Is a fever of {} degrees dangerous?", 37, 43),
        _number("What happened in the year {}?", 1500, 2020),
        _number("Can I take {} tablets of it a day?", 2, 20),
        _number("Write a poem with {} lines", 3, 40),
        _number("What does error {} mean?", 100, 600),
    ],
    "negation": [
        _one(ANIMALS, "Which plants are good for {}?", "Which plants are not good for {}?"),
        _one(PLACES, "Which airlines fly to {}?", "Which airlines do not fly to {}?"),
        _one(FIRMS, "Should I invest in {}?", "Should I never invest in {}?"),
        _one(PEOPLE, "What can {} ask of me?", "What can't {} ask of me?"),
        _one(PLACES, "Can I work in {} with a visa?", "Can I work in {} without a visa?"),
        _one(DRUGS, "Who should take {}?", "Who should not take {}?"),
    ],
    "comparison": [
        _two(PLACES, "Is {a} colder than {b}?"),
        _two(FIRMS, "Is {a} older than {b}?"),
        _two(DRUGS, "Is {a} stronger than {b}?"),
        _one(PLACES, "What is the highest hill in {}?", "What is the lowest hill in {}?"),
        _one(PLACES, "Which is the oldest hotel in {}?", "Which is the newest hotel in {}?"),
        _one(FIRMS, "What is the cheapest phone of {}?", "What is the most expensive phone of {}?"),
        _one(ANIMALS, "Are there more {} than people?", "Are there fewer {} than people?"),
    ],
    "entity": [
        _another(DRUGS, "what are the side effects of {}"),
        _another(FIRMS, "Who leads {}?"),
        _another(PLACES, "What is the airport of {} called?"),
        _another(ANIMALS, "How long do {} live?"),
        _another(LANGUAGES, "How many people speak {}?"),
        _another(MONEY, "Where are {} used?"),
    ],
    "unit": [
        lambda rng: (f"How many meters are {(n := rng.randrange(3, 90))} yards?", f"How many feet are {n} yards?"),
        lambda rng: (f"Is {(n := rng.randrange(3, 90))} mg of zinc too much?", f"Is {n} g of zinc too much?"),
        lambda rng: (f"How much is {(n := rng.randrange(3, 90))} euros in yen?", f"How much is {n} dollars in yen?"),
        lambda rng: (f"Boil it for {(n := rng.randrange(3, 90))} minutes?", f"Boil it for {n} seconds?"),
        lambda rng: (f"Can I store {(n := rng.randrange(3, 90))} GB there?", f"Can I store {n} MB there?"),
    ],
    "time": [
        _one(PLACES, "Is the museum in {} open on Monday?", "Is the museum in {} open on Sunday?"),
        _one(FIRMS, "What did {} earn last year?", "What did {} earn last quarter?"),
        _one(PLACES, "What can I do in {} tonight?", "What can I do in {} tomorrow?"),
        _one(PLACES, "How warm is {} in January?", "How warm is {} in June?"),
        _one(DRUGS, "Should I take {} before meals?", "Should I take {} after meals?"),
    ],
    "code": [
        _one(TOOLS, "What does {} -r do?", "What does {} -R do?"),
        _one(TOOLS, "How do I call {} with --quiet?", "How do I call {} with --verbose?"),
        _another(["C++", "C#", "C", "F#"], "How do I open a file in {}?"),
        _another(["list.pop()", "list.sort()", "list.copy()", "list.clear()"], "What does {} return?"),
        _another(["`==`", "`!=`", "`<=`", "`>=`"], "When is {} true for strings?"),
        _one(TOOLS, "How do I encode what {} prints?", "How do I decode what {} prints?"),
    ],
}  # fmt: skip
"""By kind, what fills a pair that looks alike and asks something else."""


def adversarial(count: int, seed: int) -> list[Labelled]:
    """So many of each kind, from the kind's templates in turn."""
    rng = random.Random(seed)
    return [
        Labelled(*templates[number % len(templates)](rng), False, kind)
        for kind, templates in KINDS.items()
        for number in range(count)
    ]


def read_pairs(path: Path) -> list[Labelled]:
    """JSON objects with a, b and same, a line each, gzipped or not. Pairs that say the same word for word and are labelled as
    different are left out: they are mistakes. Raises `InvalidRequest`."""
    try:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode().splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        found = [Labelled(str(row["a"]), str(row["b"]), bool(row["same"]), str(row.get("source", ""))) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path}: needs a JSON object with a, b and same on every line ({error}).") from error
    return [pair for pair in found if pair.same or _plain(pair.one) != _plain(pair.other)]


def _plain(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def groups(pairs: Iterable[Labelled]) -> list[int]:
    """A number for each pair: two that share a question, also by way of others, have the same."""
    parents: dict[str, str] = {}

    def root(text: str) -> str:
        while parents.setdefault(text, text) != text:
            parents[text] = parents[parents[text]]
            text = parents[text]
        return text

    listed = list(pairs)
    for pair in listed:
        parents[root(pair.one)] = root(pair.other)
    numbers: dict[str, int] = {}
    return [numbers.setdefault(root(pair.one), len(numbers)) for pair in listed]
