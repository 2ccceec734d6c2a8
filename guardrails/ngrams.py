"""What a text looks like to a linear classifier: character and word n-grams, hashed into a fixed number of places.

Feature hashing (Weinberger et al. 2009, arXiv 0902.2206) without signs; term frequencies are 1 + ln(count), weighted by inverse
document frequency, and the whole has about length one (Manning et al. 2008, sections 6.2 and 6.4). The same few lines of numpy
train and serve, so that there is nothing to keep equal.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

PLACES = 1 << 18
CHARACTERS = (2, 3, 4, 5)
WORDS = (1, 2, 3)
SHORT = 30.0
"""Added to the length of every vector, as if at a right angle: that of some ten characters. A text of one word says little, and
is given less than length one."""
MAX_CHARS = 4000
"""Of a text that are looked at as one."""

_SPACE = re.compile(r"\s+")
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\w+")
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Knuth, The Art of Computer Programming 3, 6.4

Places = NDArray[np.int64]
Values = NDArray[np.float32]


def counted(text: str) -> tuple[Places, Values]:
    """The places of a text's n-grams, each once and rising, and 1 + ln(how often)."""
    text = _NUMBER.sub("0", _SPACE.sub(" ", text[:MAX_CHARS].lower())).strip()
    letters = np.frombuffer(f" {text} ".encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    words = np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text)], dtype=np.uint64)
    found = [_grams(letters, length, salt=length) for length in CHARACTERS]
    found += [_grams(words, length, salt=16 + length) for length in WORDS]
    places, counts = np.unique(np.concatenate(found), return_counts=True)
    return places, (1 + np.log(counts)).astype(np.float32)


def _grams(symbols: NDArray[np.uint64], length: int, salt: int) -> Places:
    """[n - length + 1] The place of each run of so many symbols."""
    count = len(symbols) - length + 1
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    hashes = np.full(count, salt, dtype=np.uint64)
    for offset in range(length):
        hashes = (hashes ^ symbols[offset : offset + count]) * _MIX
        hashes ^= hashes >> np.uint64(29)
    return (hashes % np.uint64(PLACES)).astype(np.int64)


def weighted(counts: tuple[Places, Values], idf: NDArray[Any]) -> tuple[Places, Values]:
    """The vector of a text: by idf [PLACES], at length one, or less where it is short."""
    places, values = counts
    values = values * idf[places].astype(np.float32)
    return places, values / np.float32(np.sqrt(values @ values + SHORT**2))
