"""Do two questions ask the same? What forbids it, and what can be counted, from their words alone.

Sentence vectors of reversed or slightly changed questions are almost equal, so what makes another question of one is looked for
first: a number, a unit, a time, a negation, an opposite, a name, the direction of a relation, a word of code. Pure.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, lru_cache
from importlib.resources import files
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import snowballstemmer
from numpy.typing import NDArray
from ruamel.yaml import YAML

_TOKEN = re.compile(
    r"`[^`]*`"  # code
    r"|\d+(?:[.,:/]\d+)*"
    r"|(?<!\w)--?[a-z][\w-]*"  # an option
    r"|[^\W\d_]\w+(?:[._]\w+)+(?:\(\))?|\w+\(\)"  # a name of a program
    r"|(?:[a-z]\.){2,}"  # initials
    r"|[^\W\d_]+(?:['’][^\W\d_]+)*(?:\+\+|#)?"
    r"|\w+|[%$€£¥₹=<>+*^]",
    re.I,
)
_QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”|'([^']{2,})'(?!\w)")
_NUMBER = re.compile(r"\d")
_CODE = re.compile(r"^`|^--?[a-z]|\w\w[._]\w\w|\(\)$|\+\+$|#$|^[=<>+*^]$", re.I)
_ENDING = re.compile(r"['’](?:s|d|ll|re|ve|m)$")


@dataclass(frozen=True, slots=True)
class _Words:
    """What is known of words; see words.yaml."""

    same: dict[str, tuple[str, ...]]
    numbers: dict[str, str]
    units: dict[str, str]
    opposites: frozenset[tuple[str, str]]
    graded: frozenset[str]
    """That have an opposite, and so perhaps an ending of comparison."""
    lists: dict[str, frozenset[str]]


@cache
def _words() -> _Words:
    raw: dict[str, Any] = YAML(typ="safe").load(files("gearshift.platform.cache").joinpath("words.yaml").read_text())
    same = {word: tuple(line[0].split()) for line in raw["same"] for word in line}
    opposed = {(word,) for line in raw["opposites"] for word in line}
    pairs = [tuple(_stem(" ".join(same.get(word, (word,)))) for word in line) for line in raw["opposites"]]
    return _Words(
        same,
        {word: f"{number:g}" for word, number in raw["numbers"].items()},
        {word: line[0] for line in raw["units"] for word in line},
        frozenset(pair for one, other in pairs for pair in ((one, other), (other, one))),
        frozenset(
            {word for line in raw["opposites"] for word in line} | {w for w, head in same.items() if head in opposed}
        ),
        {name: frozenset(raw[name]) for name in ("times", "negations", "directions", "joining", "empty", "asking")},
    )


@lru_cache(100_000)
def _stem(word: str) -> str:
    return str(_stemmer().stemWord(word))


@cache
def _stemmer() -> Any:
    return snowballstemmer.stemmer("english")


@lru_cache(100_000)
def _canonical(word: str) -> tuple[str, ...]:
    """The words that stand for it: lower case, without endings of grammar and of comparison."""
    known = _words()
    if word in known.same:
        return known.same[word]
    word = _ENDING.sub("", word)
    if word.endswith(("n't", "n’t")):
        return (*_canonical(word[:-3]), "not")
    if word in known.units:
        return (known.units[word],)
    for ending in () if word in known.graded else ("est", "er"):
        stem = word.removesuffix(ending)
        for base in (stem, stem + "e", stem[:-1] if stem[-2:-1] == stem[-1:] else stem, stem[:-1] + "y"):
            if stem != word and base in known.graded:
                return known.same.get(base, (base,))
    return known.same.get(word, (word,))


@dataclass(frozen=True, slots=True)
class Reading:
    """A question, cut up once."""

    text: str
    words: tuple[str, ...]
    """In canonical form, all of them."""
    content: tuple[str, ...]
    """Stems of those that carry the meaning."""
    numbers: Counter[str]
    units: frozenset[str]
    times: frozenset[str]
    negations: int
    asking: frozenset[str]
    names: frozenset[str]
    """Stems of words in capitals that do not begin a sentence."""
    code: frozenset[str]
    quoted: frozenset[str]
    trigrams: frozenset[str]
    foreign: frozenset[str]
    """Words in other scripts than Latin."""


def read(text: str) -> Reading:
    known = _words()
    text = unicodedata.normalize("NFKC", text)
    tokens = list(_TOKEN.finditer(text))
    words: list[str] = []
    names: set[str] = set()
    code: set[str] = set()
    numbers: Counter[str] = Counter()
    for place, found in enumerate(tokens):
        token = found.group()
        lower = token.lower()
        if _NUMBER.match(token):
            words.append(_number(token))
            numbers[words[-1]] += 1
            continue
        if _CODE.search(token):
            code.add(lower if lower[-1] in "+#" else token)
        lower = lower.replace(".", "") if lower.endswith(".") else lower
        canonical = _canonical(lower)
        if (
            place
            and token[0].isupper()
            and lower not in known.lists["empty"]
            and text[tokens[place - 1].end() :][:1] == " "
        ):
            names.update(map(_stem, canonical))
        for word in canonical:
            if word in known.numbers:
                word = known.numbers[word]
                numbers[word] += 1
            words.append(word)
    content = [_stem(word) for word in words if word not in known.lists["empty"] and not _NUMBER.match(word)]
    present = set(words)
    return Reading(
        text=text,
        words=tuple(words),
        content=tuple(content),
        numbers=numbers,
        units=frozenset(present & set(known.units.values())),
        times=frozenset(present & known.lists["times"]),
        negations=sum(word in known.lists["negations"] for word in words) - _whether_or_not(words),
        asking=frozenset(present & known.lists["asking"]),
        names=frozenset(names),
        code=frozenset(code),
        quoted=frozenset(part.lower() for match in _QUOTED.finditer(text) for part in match.groups() if part),
        trigrams=frozenset(text.lower()[start : start + 3] for start in range(len(text) - 2)),
        foreign=frozenset(word for word in words if not word.isascii() and not _is_latin(word)),
    )


def _number(token: str) -> str:
    """1,000 is 1000, and 2.50 is 2.5; dates and times stay as they are."""
    plain = re.sub(r",(?=\d{3}(?:\D|$))", "", token)
    try:
        return f"{float(plain):g}" if len(plain) < 7 else plain
    except ValueError:
        return plain


def _whether_or_not(words: Sequence[str]) -> int:
    return sum(pair == ("or", "not") for pair in pairwise(words))


def _is_latin(word: str) -> bool:
    return all(unicodedata.name(char, "").startswith("LATIN") for char in word if char.isalpha())


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions beside each other. only: stems of content that one has and the other does not, with how often."""

    one: Reading
    other: Reading
    only_one: Counter[str]
    only_other: Counter[str]
    common: Counter[str]
    alike: float
    """Share of the words that are in the same order in both, 0 to 1."""

    @classmethod
    def of(cls, one: Reading, other: Reading) -> Pair:
        mine, others = Counter(one.content), Counter(other.content)
        alike = SequenceMatcher(None, one.words, other.words, autojunk=False).ratio()
        only_one, only_other = mine - others, others - mine
        names = one.names | other.names
        related = [(a, b) for a in only_one for b in only_other if _derived(a, b, a in names or b in names)]
        for a, b in related:
            only_one.pop(a, None)
            only_other.pop(b, None)
        return cls(one, other, only_one, only_other, mine & others, alike)

    @property
    def swapped(self) -> list[tuple[str, str]]:
        """Words that both have once, in another order."""
        once = {
            word for content in (self.one.content, self.other.content) for word, n in Counter(content).items() if n > 1
        }
        order = {word: place for place, word in enumerate(self.other.content) if word not in once}
        mine = [word for word in self.one.content if word in order]
        return [(first, then) for first, then in combinations(mine, 2) if order[first] > order[then]]


def _derived(one: str, other: str, is_name: bool) -> bool:
    """India and Indian, begin and beginner; but not Niger and Nigeria."""
    short, long = sorted((one, other), key=len)
    ending = long.removeprefix(short)
    return len(short) >= 4 and ending != long and (ending in ("n", "an", "ian") if is_name else len(ending) <= 4)


def vetoes(pair: Pair) -> list[str]:
    """What makes two questions of them, whatever else is alike; empty where nothing is known to."""
    return list(_vetoes(pair))


def _vetoes(pair: Pair) -> Iterator[str]:
    one, other = pair.one, pair.other
    if one.numbers != other.numbers:
        yield "number"
    if one.units != other.units and one.units and other.units:
        yield "unit"
    if one.times != other.times:
        yield "time"
    if one.negations != other.negations:
        yield "negation"
    if one.code != other.code:
        yield "code"
    if one.quoted != other.quoted and one.quoted and other.quoted:
        yield "quotation"
    if one.foreign != other.foreign:
        yield "script"
    if _opposite(one.words, other.words):
        yield "opposite"
    if _other_question(one.asking, other.asking):
        yield "question"
    if _reversed(pair):
        yield "direction"
    if (pair.only_one.keys() & one.names) and (pair.only_other.keys() & other.names):
        yield "name"
    if pair.only_one and pair.only_other and _replaced(one.words, other.words):
        yield "word"


def equal(pair: Pair) -> bool:
    """Word for word the same, but for spelling, endings and words of one meaning."""
    return pair.one.words == pair.other.words


def _opposite(one: Sequence[str], other: Sequence[str]) -> bool:
    mine, others = {_stem(word) for word in one}, {_stem(word) for word in other}
    return any((a, b) in _words().opposites for a in mine - others for b in others - mine)


def _other_question(one: frozenset[str], other: frozenset[str]) -> bool:
    kinds = ({"when"}, {"where"}, {"why"}, {"who", "whom", "whose"})
    mine, others = ({place for place, kind in enumerate(kinds) if kind & asked} for asked in (one, other))
    return bool(mine and others and not mine & others)


def _reversed(pair: Pair) -> bool:
    """Two things have changed places, and something says that the order matters."""
    swapped = pair.swapped
    if not swapped:
        return False
    same_words = not pair.only_one and not pair.only_other
    if all(
        (_joined(pair.one.words, two) and _joined(pair.other.words, two)) or _compound(pair, two) for two in swapped
    ):
        return False
    if same_words:
        return True
    moved = {word for two in swapped for word in two}
    return _directed(pair.one.words, moved) and _directed(pair.other.words, moved)


def _joined(words: Sequence[str], two: tuple[str, str]) -> bool:
    """A and B, A or B, between A and B: who comes first says nothing, unless a direction follows."""
    stems = [_stem(word) for word in words]
    first, last = sorted(stems.index(word) for word in two)
    between = set(words[first + 1 : last])
    return bool(between & _words().lists["joining"]) and not between & {"from", "to", "into", "than"}


def _compound(pair: Pair, two: tuple[str, str]) -> bool:
    """The performance of a laptop, and laptop performance."""

    def reach(words: Sequence[str]) -> tuple[int, set[str]]:
        stems = [_stem(word) for word in words]
        first, last = sorted(stems.index(word) for word in two)
        between = set(words[first + 1 : last])
        return last - first, between

    (near, _), (far, between) = sorted(map(reach, (pair.one.words, pair.other.words)), key=lambda each: each[0])
    return near == 1 and far <= 4 and bool(between & {"of", "in", "for", "on"}) and between <= _words().lists["empty"]


def _directed(words: Sequence[str], moved: set[str]) -> bool:
    return any(
        word in _words().lists["directions"] and _stem(following) in moved for word, following in pairwise(words)
    )


def _replaced(one: Sequence[str], other: Sequence[str]) -> bool:
    """One word stands in the place of another one, and nothing else differs."""
    return len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) == 1


NAMES = (
    "cosine", "common", "share", "fewer only", "more only", "letters only", "alike", "order", "numbers", "negations", "units",
    "times", "question", "first word", "first words", "last word", "swapped", "names only", "names common", "trigrams", "bigrams",
    "shorter", "longer", "difference", "content", "you", "I",
)  # fmt: skip


def features(pair: Pair, cosine: float) -> NDArray[np.float64]:
    """[len(NAMES)]. cosine: of the questions' vectors."""
    one, other = pair.one, pair.other
    only = sorted((pair.only_one.total(), pair.only_other.total()))
    union = sum((Counter(one.content) | Counter(other.content)).values()) or 1
    lengths = sorted((len(one.words), len(other.words)))
    order = SequenceMatcher(None, one.content, other.content, autojunk=False).ratio()
    return np.array(
        [
            cosine,
            pair.common.total(),
            pair.common.total() / union,
            only[0],
            only[1],
            sum(len(word) * count for rest in (pair.only_one, pair.only_other) for word, count in rest.items()),
            pair.alike,
            order,
            one.numbers != other.numbers,
            one.negations != other.negations,
            one.units != other.units,
            one.times != other.times,
            one.asking != other.asking,
            one.words[:1] == other.words[:1],
            _overlap(one.words[:2], other.words[:2]),
            one.words[-1:] == other.words[-1:],
            min(3, len(pair.swapped)),
            len(one.names ^ other.names),
            len(one.names & other.names),
            _overlap(one.trigrams, other.trigrams),
            _overlap(tuple(pairwise(one.words)), tuple(pairwise(other.words))),
            lengths[0],
            lengths[1],
            lengths[1] - lengths[0],
            min(len(one.content), len(other.content)),
            _has(one, "you", "your") != _has(other, "you", "your"),
            _has(one, "i", "my", "me", "we") != _has(other, "i", "my", "me", "we"),
        ],
        np.float64,
    )


def _overlap(one: Sequence[Any] | frozenset[str], other: Sequence[Any] | frozenset[str]) -> float:
    mine, others = set(one), set(other)
    return len(mine & others) / (len(mine | others) or 1)


def _has(reading: Reading, *words: str) -> bool:
    return not set(words).isdisjoint(reading.words)
