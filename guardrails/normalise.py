"""What a text says under its disguise: one view for every rule, in which look-alike letters, invisible characters, markup,
encodings and scattered letters are undone.

Each step is a function from a view to a view. Where a disguise can only be guessed (leetspeak, rot13, words written backwards,
letters set apart) the guess is taken when it makes words of `words.txt` out of what were none, so that part numbers,
addresses and other languages stay as they are. All steps together take time linear in the text.

Character data: Unicode Technical Standard 39 (confusables), Standard Annex 15 (normalization forms).
"""

from __future__ import annotations

import base64
import binascii
import codecs
import html
import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.resources import files
from string import ascii_letters
from urllib.parse import unquote_to_bytes

from gearshift.guardrails.view import Edit, View

ROUNDS = 4
"""Encodings within encodings that are undone."""
LONGEST_EXPANSION = 4
"""Characters that one may become; those that stand for more are kept (U+FDFA would become 18)."""
LEAST_TURNED = 3
"""Words in a row that a code must make sense of; of a text of no more than `SHORT`, two."""
SHORT = 4
LONGEST_SEGMENT = 400
"""Letters set apart that are cut into words."""


def normalise(text: str) -> View:
    """The view of a text that rules read. Its text is in the original's case."""
    view = View.of(text)
    for _ in range(ROUNDS):
        before = view.text
        for step in STEPS:
            view = step(view)
        if view.text == before:
            break
    return view


@lru_cache(1)
def words() -> frozenset[str]:
    return frozenset((files("gearshift.guardrails") / "words.txt").read_text().split())


# --- characters ---

_FOREIGN = re.compile(r"[^\x09\x0a\x20-\x7e]+")
_TOKEN = re.compile(r"\w+")
_NAMED_LETTER = re.compile(
    r"^(?:LATIN|TAG|REGIONAL INDICATOR|NEGATIVE|SQUARED|CROSSED NEGATIVE|CIRCLED|PARENTHESIZED)\b.* ([A-Z])$"
)


def characters(view: View) -> View:
    """Compatibility forms, accents on Latin letters, invisible and control characters, letters that look like Latin ones."""
    if _FOREIGN.search(view.text) is None:
        return view
    folded = view.edited(_folded(view.text))
    return folded.edited(_look_alikes(folded.text))


def _folded(text: str) -> Iterator[Edit]:
    for match in _FOREIGN.finditer(text):
        run = match.group()
        parts = [_fold(character) for character in run]
        plain = "".join(parts)
        if plain == run:
            continue
        if len(plain) == len(run) and "" not in parts:
            yield Edit(*match.span(), plain)
        else:
            yield Edit(*match.span(), plain, [index for index, part in enumerate(parts) for _ in part])


@lru_cache(16384)
def _fold(character: str) -> str:
    category = unicodedata.category(character)
    if category in ("Cf", "Cc", "Mn", "Me") or 0xFE00 <= ord(character) <= 0xFE0F:
        tag = ord(character) - 0xE0000  # the tag characters spell ASCII that nobody sees
        return chr(tag) if 0x20 <= tag < 0x7F else "\n" if character in "\x0b\x0c\x1c\x1d\x1e\x85" else ""
    if category in ("Zs", "Zl", "Zp"):
        return " "
    if character in _PUNCTUATION:
        return _PUNCTUATION[character]
    plain = "".join(c for c in unicodedata.normalize("NFKD", character) if unicodedata.category(c) != "Mn")
    if plain.isascii() and 0 < len(plain) <= LONGEST_EXPANSION:
        return plain
    named = _NAMED_LETTER.match(unicodedata.name(character, ""))
    if named is not None:
        return named[1].lower()
    whole = unicodedata.normalize("NFKC", character)
    return whole if len(whole) <= LONGEST_EXPANSION else character


_PUNCTUATION = {
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "–": "-",
    "—": "-",
    "‐": "-",
    "‑": "-",
    "−": "-",
    "·": ".",
    "•": "*",
}


def _look_alikes(text: str) -> Iterator[Edit]:
    """Words that come out as ASCII when every letter is taken for the Latin one it looks like."""
    if text.isascii():
        return
    for match in _TOKEN.finditer(text):
        if match.group().isascii():
            continue
        latin = "".join(character if character.isascii() else _latin(character) for character in match.group())
        if latin.isascii() and len(latin) == len(match.group()):
            yield Edit(match.start(), match.end(), latin)


@lru_cache(16384)
def _latin(character: str) -> str:
    """The ASCII character that this one looks like, or itself."""
    like = (each["c"] for each in _confusables().get(character, ()))
    return next((each for each in like if len(each) == 1 and each.isascii() and each.isalnum()), character)


@lru_cache(1)
def _confusables() -> dict[str, list[dict[str, str]]]:
    from confusable_homoglyphs import confusables  # 5 MB that only texts with foreign letters need

    table: dict[str, list[dict[str, str]]] = confusables.confusables_data
    return table


# --- markup ---

_MARKUP = re.compile(r"<!--|-->|</?[A-Za-z][^<>]{0,500}>|\]\([^()\s]{0,500}\)|!\[|\[(?=[^\[\]]{1,200}\]\()")
_ATTRIBUTE = re.compile(r"""=\s{0,8}(?:"([^"]*\s[^"]*)"|'([^']*\s[^']*)')""")
_EMPHASIS = re.compile(r"(?<=[A-Za-z])(?:\*{1,3}|_{2,3}|~~|`)|(?:\*{2,3}|~~)(?=[A-Za-z])")
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")
_BLOCKS = re.compile(r"</?(?:p|br|div|li|ul|ol|td|tr|th|h[1-6]|table|hr)\b", re.IGNORECASE)


def markup(view: View) -> View:
    """HTML tags and comments, entities, Markdown's links and emphasis within a word. What hid behind them stays: comments
    and sentences in attributes."""
    if "&" in view.text:
        view = view.edited(_entities(view.text))
    if "<" in view.text or "](" in view.text:
        view = view.edited(_tags(view.text))
    if any(mark in view.text for mark in ("*", "__", "~~", "`")):
        view = view.edited(Edit(*match.span(), "") for match in _EMPHASIS.finditer(view.text))
    return view


def _entities(text: str) -> Iterator[Edit]:
    for match in _ENTITY.finditer(text):
        meant = html.unescape(match.group())
        if meant != match.group():
            yield Edit(*match.span(), meant)


def _tags(text: str) -> Iterator[Edit]:
    for match in _MARKUP.finditer(text):
        start, end = match.span()
        inner = " " if _BLOCKS.match(match.group()) or match.group()[0] in "]!" else ""
        for attribute in _ATTRIBUTE.finditer(match.group()):
            kept = 1 if attribute[1] is not None else 2
            yield Edit(start, match.start() + attribute.start(kept), "\n")
            start, inner = match.start() + attribute.end(kept), "\n"
        yield Edit(start, end, inner)


# --- encodings ---

_ESCAPED = re.compile(r"(?:\\u\{?[0-9A-Fa-f]{4,6}\}?|\\x[0-9A-Fa-f]{2}){2,}")
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}(?:[^\s%]{0,40}%[0-9A-Fa-f]{2})+")
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:0x)?[0-9A-Fa-f]{2}(?:[ :,]?(?:0x)?[0-9A-Fa-f]{2}){7,}(?![0-9A-Za-z])")
_BITS = re.compile(r"(?<![01])[01]{8}(?:[ ,]?[01]{8}){4,}(?![01])")
_BASE64 = re.compile(
    r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{12,}(?:\r?\n[A-Za-z0-9+/_-]{12,})*(?:[A-Za-z0-9+/_-]{0,11}={1,2})?"
)
_BASE32 = re.compile(r"(?<![A-Z2-7])[A-Z2-7]{16,}={0,6}(?![A-Za-z0-9])")
_ESCAPE = re.compile(r"\\u\{?([0-9A-Fa-f]{4,6})\}?|\\x([0-9A-Fa-f]{2})")


def encodings(view: View) -> View:
    """Base64, base32, hex, bits, URL encoding and escapes, where words come out."""
    for mark, pattern, decode in _CODES:
        if mark.search(view.text) is not None:
            view = view.edited(
                Edit(*match.span(), decoded)
                for match in pattern.finditer(view.text)
                if (decoded := decode(match.group())) is not None
            )
    return view


def _text(data: bytes) -> str | None:
    """Bytes that are readable text."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    letters = sum(map(str.isalnum, text)) + text.count(" ")
    return (
        text
        if text and letters >= 0.6 * len(text) and text.replace("\n", " ").replace("\t", " ").isprintable()
        else None
    )


def _of_percent(code: str) -> str | None:
    try:
        return unquote_to_bytes(code).decode()
    except UnicodeDecodeError:
        return None


def _of_escapes(code: str) -> str | None:
    points = [int(match[1] or match[2], 16) for match in _ESCAPE.finditer(code)]
    return "".join(map(chr, points)) if max(points) < 0xD800 else None


def _of_hex(code: str) -> str | None:
    return _text(bytes.fromhex(re.sub(r"0x|[ :,]", "", code)))


def _of_bits(code: str) -> str | None:
    bits = re.sub("[ ,]", "", code)
    return _text(bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)))


def _of_base64(code: str) -> str | None:
    code = "".join(code.split()).rstrip("=").replace("-", "+").replace("_", "/")
    if len(code) % 4 == 1:
        code = code[:-1]
    return _text(base64.b64decode(code + "=" * (-len(code) % 4)))


def _of_base32(code: str) -> str | None:
    code = code.rstrip("=")
    try:
        return _text(base64.b32decode(code + "=" * (-len(code) % 8)))
    except binascii.Error:
        return None


_DIGIT_PAIRS = re.compile(r"(?<![0-9A-Za-z])(?:0x)?[0-9A-Fa-f]{2}(?:[ :,]?(?:0x)?[0-9A-Fa-f]{2}){2}")
_LONG_CODE = re.compile(r"[A-Za-z0-9+/_-]{12}")
_CODES: tuple[tuple[re.Pattern[str], re.Pattern[str], Callable[[str], str | None]], ...] = (
    (re.compile("%"), _PERCENT, _of_percent),
    (re.compile(r"\\"), _ESCAPED, _of_escapes),
    (_DIGIT_PAIRS, _BITS, _of_bits),
    (_DIGIT_PAIRS, _HEX, _of_hex),
    (_LONG_CODE, _BASE32, _of_base32),
    (_LONG_CODE, _BASE64, _of_base64),
)
"""What every code has, at the cost of a short search; the code; what it says."""


# --- words in disguise ---

_APART = re.compile(r"(?<![^\W_])(?:[A-Za-z]([ .,\-_*|/+~^:;\n]))(?:[A-Za-z]\1)+[A-Za-z](?![^\W_])")
_PIECES = re.compile(r"(?<![^\W_])[A-Za-z]+(?:[.\-_*~|/\\^+][A-Za-z]+)+(?![^\W_])")
_MARK_WITHIN = re.compile(r"\b[A-Za-z][ .,\-_*|/+~^:;\n][A-Za-z]\b|[A-Za-z][.\-_*~|/\\^+][A-Za-z]")
_LEET = re.compile(r"(?<![^\W_])[A-Za-z0-9@$!|+€]*[A-Za-z@$!|+€][A-Za-z0-9@$!|+€]*")
_LEET_MARK = re.compile(r"[0-9@$|+€]|!(?=[A-Za-z])")
_REPEATED = re.compile(r"([A-Za-z])\1{2,}")
_DRAWN_OUT = re.compile(r"[A-Za-z]*([A-Za-z])\1{2,}[A-Za-z]*")
_WORD = re.compile(r"[A-Za-z]+")
_TO_LETTERS = [str.maketrans("013456789@$!|+€", f"o{one}easg{seven}bgas{one}{one}te") for one in "il" for seven in "t"]


def scattered(view: View) -> View:
    """Letters set apart by spaces or marks, and letters repeated."""
    if _MARK_WITHIN.search(view.text) is not None:
        view = view.edited(edit for match in _APART.finditer(view.text) for edit in _joined(match))
        view = view.edited(edit for match in _PIECES.finditer(view.text) if (edit := _pieces(match)) is not None)
    if _REPEATED.search(view.text) is not None:
        view = view.edited(edit for match in _DRAWN_OUT.finditer(view.text) for edit in _drawn_out(match))
    return view


def _drawn_out(match: re.Match[str]) -> Iterator[Edit]:
    """A word of which letters was repeated, with one of them."""
    if _REPEATED.sub(r"\1", match.group()).lower() in words():
        for repeated in _REPEATED.finditer(match.group()):
            yield Edit(match.start() + repeated.start() + 1, match.start() + repeated.end(), "")


def _joined(match: re.Match[str]) -> Iterator[Edit]:
    """Takes the separators out, all but those between two words."""
    letters = match.group()[::2]
    if len(letters) > LONGEST_SEGMENT:
        yield Edit(*match.span(), letters, range(0, len(match.group()), 2))
        return
    ends = _segment(letters.lower())
    for index in range(len(letters) - 1):
        at = match.start() + 2 * index + 1
        yield Edit(at, at + 1, " " if index + 1 in ends else "")


def _segment(letters: str) -> set[int]:
    """Ends of the words in a run of letters: the cut with the fewest letters outside of words, then the fewest words."""
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for end in range(1, len(letters) + 1):
        strays, count, _ = best[end - 1]
        choices = [(strays + 1, count + 1, end - 1)]
        known = (start for start in range(max(0, end - 20), end) if letters[start:end] in words())
        choices += [(best[start][0], best[start][1] + 1, start) for start in known]
        best.append(min(choices))
    ends, at = set(), len(letters)
    while at:
        ends.add(at)
        at = best[at][2]
    return ends if best[-1][0] <= len(letters) // 3 else set()


def _pieces(match: re.Match[str]) -> Edit | None:
    """A word that marks cut up: a word when joined, and not made of words."""
    pieces = _WORD.findall(match.group().lower())
    joined = "".join(pieces)
    if joined not in words() or all(len(piece) > 2 and piece in words() for piece in pieces):
        return None
    order = [index for index, character in enumerate(match.group()) if character.isalpha()]
    return Edit(*match.span(), "".join(match.group()[index] for index in order), order)


def leet(view: View) -> View:
    """Digits and marks in the place of letters."""
    if _LEET_MARK.search(view.text) is None:
        return view
    edits = [
        Edit(match.start(), match.start() + len(plain), plain)
        for match in _LEET.finditer(view.text)
        if (plain := _unleet(match.group())) is not None
    ]
    if sum(edit.end - edit.start > 3 for edit in edits) < 2:  # short ones mean something only in company
        edits = [edit for edit in edits if edit.end - edit.start > 3]
    return view.edited(edits)


def _unleet(token: str) -> str | None:
    token = token.rstrip("!|+")
    if len(token) < 2 or _LEET_MARK.search(token) is None or token.lower() in words():
        return None
    plain = (token.translate(table) for table in _TO_LETTERS)
    return next((each for each in plain if each.lower() in words()), None)


_ROT13 = str.maketrans(ascii_letters, codecs.encode(ascii_letters, "rot13"))


def _rot13(text: str) -> str:
    return text.translate(_ROT13)


def turned(view: View) -> View:
    """rot13, and text written from its end to its beginning."""
    found = [word for word in _WORD.findall(view.text.lower()) if len(word) > 2]
    least = LEAST_TURNED if len(found) > SHORT else 2
    if sum(word not in words() for word in found) < least:
        return view
    view = _recoded(view, least, _rot13, lambda text: (_rot13(text), None))
    return _recoded(view, least, lambda word: word[::-1], lambda text: (text[::-1], range(len(text) - 1, -1, -1)))


def _recoded(
    view: View, least: int, word: Callable[[str], str], text: Callable[[str], tuple[str, range | None]]
) -> View:
    """Undoes a code on runs of words that are none, of which at least so many are words when it is undone."""
    edits: list[Edit] = []
    start = end = hits = misses = 0
    known = words()

    def close() -> None:
        nonlocal hits, misses
        if hits >= least and hits > misses:
            edits.append(Edit(start, end, *text(view.text[start:end])))
        hits = misses = 0

    for match in _WORD.finditer(view.text):
        plain = match.group().lower()
        if len(plain) < 3:
            continue
        if plain in known:
            if hits:
                close()
        elif word(plain) in known:
            if not hits:
                start, misses = match.start(), 0
            hits, end = hits + 1, match.end()
        elif hits:
            misses += 1
    close()
    return view.edited(edits)


STEPS = (characters, markup, encodings, scattered, leet, turned)
