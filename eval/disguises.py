"""Ways to write a text so that a filter does not see what it says, for measuring filters: each keeps every word."""

from __future__ import annotations

import base64
import codecs
import random
from collections.abc import Callable

Disguise = Callable[[str, random.Random], str]
_LOOK_ALIKES = str.maketrans("aceiopsxyBHKMT", "асеіорѕхуВНКМТ")
_LEET = str.maketrans("aeiostAEIOST", "431057431057")
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"


def zero_width(text: str, draw: random.Random) -> str:
    return "".join(c + (draw.choice(_INVISIBLE) if c.isalpha() and draw.random() < 0.5 else "") for c in text)


def full_width(text: str, draw: random.Random) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


def look_alikes(text: str, draw: random.Random) -> str:
    return "".join(c.translate(_LOOK_ALIKES) if draw.random() < 0.7 else c for c in text)


def leet(text: str, draw: random.Random) -> str:
    return text.translate(_LEET)


def spaced(text: str, draw: random.Random) -> str:
    return "   ".join(" ".join(word) for word in text.split())


def dotted(text: str, draw: random.Random) -> str:
    return " ".join(".".join(word) for word in text.split())


def in_base64(text: str, draw: random.Random) -> str:
    return base64.b64encode(text.encode()).decode()


def in_hex(text: str, draw: random.Random) -> str:
    return text.encode().hex()


def rot13(text: str, draw: random.Random) -> str:
    return codecs.encode(text, "rot13")


def percent(text: str, draw: random.Random) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def nested(text: str, draw: random.Random) -> str:
    return in_base64(percent(in_base64(text, draw), draw), draw)


def entities(text: str, draw: random.Random) -> str:
    return "".join(f"&#{ord(c)};" if c.isalpha() else c for c in text)


def tags(text: str, draw: random.Random) -> str:
    return "".join(c + ("<b></b>" if c.isalpha() and draw.random() < 0.2 else "") for c in text)


def mixed_case(text: str, draw: random.Random) -> str:
    return "".join(c.upper() if draw.random() < 0.5 else c.lower() for c in text)


def backwards(text: str, draw: random.Random) -> str:
    return text[::-1]


def typing_errors(text: str, draw: random.Random) -> str:
    """Every twentieth letter changes places with the next."""
    letters = list(text)
    for at in range(len(letters) - 1):
        if letters[at].isalpha() and letters[at + 1].isalpha() and draw.random() < 0.05:
            letters[at], letters[at + 1] = letters[at + 1], letters[at]
    return "".join(letters)


DISGUISES: dict[str, Disguise] = {
    "zero-width": zero_width,
    "full-width": full_width,
    "look-alikes": look_alikes,
    "leetspeak": leet,
    "spaced": spaced,
    "dotted": dotted,
    "base64": in_base64,
    "hex": in_hex,
    "rot13": rot13,
    "URL encoding": percent,
    "base64 in URL in base64": nested,
    "HTML entities": entities,
    "HTML tags": tags,
    "mixed case": mixed_case,
    "backwards": backwards,
    "typing errors": typing_errors,
}
