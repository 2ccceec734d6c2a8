"""The exact cache: the same request to the same release of the same tenant gets the same answer, from Redis."""

from __future__ import annotations

import hashlib
import logging
from functools import cached_property
from typing import Literal

import msgspec

from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.request import Delta, FinishReason, Message, SamplingParams, Usage

log = logging.getLogger(__name__)

Mode = Literal["off", "deterministic", "all"]
CHECKSUM_BYTES = 8
EXACT = "exact"
SCHEMA = b"2 "
"""Of questions and answers; another one finds none of the old."""


class Question(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Everything that an answer depends on. What is not in here must not change an answer."""

    tenant: str
    name: str
    """Of the release."""
    release: str
    """Fingerprint of the release: weights revision, engine precision, prompt, policy."""
    messages: tuple[Message, ...]
    sampling: SamplingParams
    salt: str
    raw: bool = False
    """A prompt that is continued, and not a conversation."""
    token_ids: tuple[int, ...] | None = None
    judge: str = ""
    generation: int = 0

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(SCHEMA + msgspec.msgpack.encode(self)).hexdigest()


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A finished answer, in the pieces it was sent in."""

    pieces: tuple[str, ...]
    finish_reason: FinishReason
    usage: Usage

    def deltas(self) -> list[Delta]:
        """The answer again; its last piece says that the prompt came from a cache."""
        usage = Usage(self.usage.prompt_tokens, self.usage.completion_tokens, cached_tokens=self.usage.prompt_tokens)
        return [*(Delta(piece) for piece in self.pieces), Delta("", self.finish_reason, usage)]


def cacheable(mode: Mode, sampling: SamplingParams) -> bool:
    """An answer is kept as text: one with probabilities, or with its prompt, is not."""
    if sampling.logprobs is not None or sampling.echo:
        return False
    return mode == "all" or (mode == "deterministic" and sampling.deterministic)


class ExactCache:
    """Never fails a request: what can't be read, is damaged or is from another version is a miss."""

    def __init__(self, store: Store, ttl_s: float, max_answer_bytes: int) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._max_bytes = max_answer_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Answer).decode

    async def get(self, question: Question) -> Answer | None:
        try:
            return self.decoded(await self._store.get(self.key(question)))
        except StoreAway:
            return None

    def decoded(self, value: bytes | None) -> Answer | None:
        """None as well for one that is damaged or of another version."""
        if value is None or _checksum(value[CHECKSUM_BYTES:]) != value[:CHECKSUM_BYTES]:
            return None
        try:
            return self._decode(value[CHECKSUM_BYTES:])
        except msgspec.DecodeError:
            return None

    async def put(self, question: Question, answer: Answer) -> None:
        value = self._encode(answer)
        if len(value) > self._max_bytes:
            return
        try:
            await self._store.set(self.key(question), _checksum(value) + value, self._ttl_s)
        except StoreAway:
            log.debug("an answer was not stored")

    def key(self, question: Question) -> str:
        """Where in Redis: names first, so that what belongs to one is found again."""
        return self._store.key(EXACT, question.tenant, question.name, question.key)

    async def purge(self, tenant: str = "*", release: str = "*") -> int:
        """Deletes what is kept of a tenant, a release, both or all; the number of answers. Raises `StoreAway`."""
        return await self._store.delete_all(self._store.key(EXACT, tenant, release, "*"))


def _checksum(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=CHECKSUM_BYTES).digest()
