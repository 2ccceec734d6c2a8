"""Redaction that leaves JSON what it is: only values change, a number that goes becomes a string, and keys stay.

A text is a document when all of it is a JSON object or array, as the arguments and results of tools are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_DEPTH = 3
"""Documents in the strings of documents."""
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
            found.append(Leaf(start + 1, end - 1, json.loads(match[1], strict=False), is_string=True))
    return found


def redacted(text: str, places: Sequence[Place], find: Find, depth: int = 0) -> str:
    """With marks in the place of what was found. find: in what a string says, where it is written otherwise."""
    found = leaves(text)
    if found is None:
        return marked(text, places)
    parts, done = [], 0
    for leaf in found:
        new = _new(text[leaf.start : leaf.end], leaf, places, find, depth)
        parts += [text[done : leaf.start], new]
        done = leaf.end
    return "".join([*parts, text[done:]])


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


def _new(raw: str, leaf: Leaf, places: Sequence[Place], find: Find, depth: int) -> str:
    """What stands in the place of a leaf."""
    mine = [each for each in places if each.start < leaf.end and leaf.start < each.end]
    if leaf.is_string and depth < MAX_DEPTH and leaves(leaf.value) is not None:
        theirs = _carried(raw, leaf, mine)
        if theirs is None:
            return f"[REDACTED:{mine[0].rule}]"
        inner = redacted(leaf.value, [*find(leaf.value), *theirs], find, depth + 1)
        return raw if inner == leaf.value else json.dumps(inner, ensure_ascii=False)[1:-1]
    said = find(leaf.value) if depth and leaf.is_string and leaf.value != raw else ()
    if len(said) > len(mine):  # escapes hide some of it
        return f"[REDACTED:{said[0].rule}]"
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
