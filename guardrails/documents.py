"""Redaction that leaves JSON what it is: only values change, a number that goes becomes a string, and keys stay.

A text is a document when all of it is a JSON object or array, as the arguments and results of tools are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

MAX_DEPTH = 3
"""Documents in the strings of documents."""
MOST_WITHIN = 1000
"""Documents in the strings of one document; of more, each is a string."""
_TOKENS = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|(-?\d[\d.eE+-]*)')
_ESCAPES = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)")


class Place(NamedTuple):
    """Characters [start, end), and what the mark in their place names."""

    start: int
    end: int
    rule: str


class Leaf(NamedTuple):
    """A value that is a string or a number, at [start, end) of the text, without the string's quotes. value: undone escapes."""

    start: int
    end: int
    value: str
    is_string: bool


Find = Callable[[str], Sequence[Place]]


def leaves(text: str) -> list[Leaf] | None:
    """None for what is no document."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = []
    for match in _TOKENS.finditer(text):
        if match[3] is not None:
            found.append(Leaf(*match.span(3), match[3], is_string=False))
        elif match[2] is None:
            start, end = match.span(1)
            written = text[start + 1 : end - 1]
            value = json.loads(match[1], strict=False) if "\\" in written else written
            found.append(Leaf(start + 1, end - 1, value, is_string=True))
    return found


def redacted(text: str, places: Sequence[Place], find: Find, depth: int = 0) -> str:
    """With marks in the place of what was found. find: in a document within."""
    found = leaves(text)
    if found is None:
        return marked(text, places)
    opens = sum(leaf.is_string and leaf.value[:1] in ("{", "[") for leaf in found) <= MOST_WITHIN and depth < MAX_DEPTH
    parts, done = [], 0
    for leaf, mine in zip(found, _shared(places, found), strict=True):
        raw = text[leaf.start : leaf.end]
        if mine or raw != leaf.value:
            parts += [text[done : leaf.start], _new(raw, leaf, mine, find, depth, opens)]
            done = leaf.end
    return "".join([*parts, text[done:]])


def _shared(places: Sequence[Place], found: Sequence[Leaf]) -> Iterator[list[Place]]:
    """Of each leaf, the places that overlap it."""
    ordered, at, near = sorted(places), 0, list[Place]()
    for leaf in found:
        while at < len(ordered) and ordered[at].start < leaf.end:
            near.append(ordered[at])
            at += 1
        near = [place for place in near if place.end > leaf.start]
        yield near


def escaped(text: str) -> list[Leaf]:
    """Strings of a document that say something else than what is written, and are no documents themselves."""
    odd = [leaf for leaf in leaves(text) or () if leaf.is_string and leaf.value != text[leaf.start : leaf.end]]
    return [leaf for leaf in odd if leaves(leaf.value) is None]


def marked(text: str, places: Sequence[Place]) -> str:
    """Places that overlap become one, named by the first."""
    parts: list[str] = []
    done = 0
    for start, end, rule in sorted(places):
        if start >= done:
            parts += [text[done:start], f"[REDACTED:{rule}]"]
        done = max(done, end)
    return "".join([*parts, text[done:]])


def _new(raw: str, leaf: Leaf, mine: Sequence[Place], find: Find, depth: int, opens: bool) -> str:
    """What stands in the place of a leaf. mine: what was found there. opens: whether a document in it is looked into; one that is
    not goes as a whole."""
    if leaf.is_string and leaves(leaf.value) is not None:
        theirs = _carried(raw, leaf, mine) if opens else None
        if theirs is None and not mine:
            return raw
        if theirs is None:
            return f"[REDACTED:{mine[0].rule}]"
        inner = redacted(leaf.value, [*find(leaf.value), *theirs], find, depth + 1)
        return raw if inner == leaf.value else json.dumps(inner, ensure_ascii=False)[1:-1]
    if not mine:
        return raw
    if not leaf.is_string:
        return f'"[REDACTED:{mine[0].rule}]"'
    escapes = [match.span() for match in _ESCAPES.finditer(raw)]
    return marked(raw, [_outside(each, leaf, escapes) for each in mine])


def _outside(place: Place, leaf: Leaf, escapes: Sequence[tuple[int, int]]) -> Place:
    """Within the leaf, and with the whole of an escape that it cuts."""
    start, end = max(0, place.start - leaf.start), min(leaf.end, place.end) - leaf.start
    for first, last in escapes:
        start = first if first < start < last else start
        end = last if first < end < last else end
    return Place(start, end, place.rule)


def _carried(raw: str, leaf: Leaf, mine: Sequence[Place]) -> list[Place] | None:
    """What was found in a string as it is written, in what it says; None where that can't be told."""
    found = []
    for each in mine:
        start, end, rule = _outside(each, leaf, [match.span() for match in _ESCAPES.finditer(raw)])
        said = json.loads(f'"{raw[start:end]}"', strict=False)
        at = leaf.value.find(said)
        if at < 0:
            return None
        while at >= 0:
            found.append(Place(at, at + len(said), rule))
            at = leaf.value.find(said, at + len(said))
    return found
