"""Which replica of a model a request goes to: the one where it is estimated to begin soonest.

A replica has to compute what is queued there, and of this prompt what it has not computed before. Both are tokens, so they add
up: a replica that holds the beginning of the prompt wins until its queue is longer than what that saves. Beginnings are told
apart by chained hashes of the text, as the engine tells blocks apart by chained hashes of tokens, which a gateway does not know.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from gearshift.platform.request import Request

CHUNK = 128
"""Characters that a hash stands for."""
CHARS_PER_TOKEN = 4
LEAST_HELD = 64
"""Chunks remembered of a replica whose cache nobody knows the size of."""


@dataclass(frozen=True, slots=True)
class Option:
    """A replica that could take the request, in tokens. queued: still to be computed there; matched: of the prompt, computed
    there before; streams: answers that grow there, each a token a step."""

    queued: int
    matched: int = 0
    streams: int = 0

    def cost(self, prompt: int) -> int:
        """Tokens that are computed there before the answer begins, about."""
        return self.queued + self.streams + max(0, prompt - self.matched)


Choose = Callable[[Sequence[Option], int, Sequence[Hashable], bytes], int]
"""Options, tokens of the prompt, names of the replicas, what equal options are told apart by; to the place of one."""


def chain(request: Request) -> list[bytes]:
    """Hashes of the beginnings of a prompt, from short to long: each stands for a chunk and everything before it. Nothing is
    shared between tenants."""
    text = request.prompt if isinstance(request.prompt, str) else ""
    if isinstance(request.prompt, tuple):
        text = " ".join(map(str, request.prompt))
    text += "".join(f"{message.role}\0{message.content}\0" for message in request.messages)
    data = text.encode()
    found, parent = [], f"{request.tenant}\0{request.cache_salt}".encode()
    for start in range(0, len(data) - CHUNK + 1, CHUNK):
        parent = hashlib.blake2b(parent + data[start : start + CHUNK], digest_size=8).digest()
        found.append(parent)
    return found


def prompt_tokens(request: Request) -> int:
    """About."""
    if isinstance(request.prompt, tuple):
        return len(request.prompt)
    characters = len(request.prompt or "") + sum(len(message.content) for message in request.messages)
    return characters // CHARS_PER_TOKEN


class Held:
    """The beginnings that one replica was sent, of which the latest are probably still in its cache."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def matched(self, hashes: Sequence[bytes]) -> int:
        """Chunks at the beginning that were sent there before."""
        return next((place for place, each in enumerate(hashes) if each not in self._known), len(hashes))

    def add(self, hashes: Iterable[bytes], capacity_tokens: int) -> None:
        """capacity_tokens: of the replica's cache; what does not fit is forgotten, the oldest first."""
        for each in hashes:
            self._known[each] = None
            self._known.move_to_end(each)
        most = max(LEAST_HELD, capacity_tokens * CHARS_PER_TOKEN // CHUNK)
        while len(self._known) > most:
            self._known.popitem(last=False)


def choose(options: Sequence[Option], prompt: int, names: Sequence[Hashable], key: bytes) -> int:
    """The place of the one with the least cost. Equal ones are told apart by rendezvous hashing (Thaler & Ravishankar 1998), so
    that all gateways send what begins the same to the same replica before any of them knows where it is held."""

    def rank(place: int) -> tuple[int, bytes]:
        name = hashlib.blake2b(key + str(names[place]).encode(), digest_size=8).digest()
        return options[place].cost(prompt), name

    return min(range(len(options)), key=rank)
