"""The exact cache: the same request to the same release of the same tenant gets the same answer, from Redis."""

from __future__ import annotations

import hashlib
import logging
import zlib
from dataclasses import replace
from functools import cached_property
from typing import Literal

import msgspec

from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Semantic
from gearshift.platform.request import Delta, FinishReason, Message, SamplingParams, Usage

log = logging.getLogger(__name__)

Mode = Literal["off", "deterministic", "all"]
CHECKSUM_BYTES = 8
PLAIN_BYTES = 1024
ZLIB = b"\x78"
EXACT, SEMANTIC, PROMPT = "exact", "semantic", "kv"
"""Where answers are, the questions that the semantic cache compares, and the KV blocks of prompts."""
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

    @property
    def last(self) -> str:
        """What is asked in the end."""
        return self.messages[-1].content

    @cached_property
    def partition(self) -> str:
        """Of those that differ in what is asked in the end, and in nothing else."""
        blank = replace(self.messages[-1], content="")
        rest = msgspec.structs.replace(self, messages=(*self.messages[:-1], blank))
        return f"{self.tenant}:{self.name}:{rest.key}"


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A finished answer, in the pieces it was sent in."""

    pieces: tuple[str, ...]
    finish_reason: FinishReason
    usage: Usage

    def deltas(self) -> list[Delta]:
        """The answer again; its last piece says that the prompt came from a cache."""
        return [*(Delta(piece) for piece in self.pieces), Delta("", self.finish_reason, self._usage)]

    def whole(self) -> Delta:
        """All of it at once."""
        return Delta("".join(self.pieces), self.finish_reason, self._usage)

    @property
    def _usage(self) -> Usage:
        return Usage(self.usage.prompt_tokens, self.usage.completion_tokens, cached_tokens=self.usage.prompt_tokens)


def cacheable(mode: Mode, sampling: SamplingParams) -> bool:
    """An answer is kept as text: one with probabilities, or with its prompt, is not."""
    if sampling.logprobs is not None or sampling.echo:
        return False
    return mode == "all" or (mode == "deterministic" and sampling.deterministic)


def comparable(question: Question, settings: Semantic) -> bool:
    """Whether the answer to another question of the same partition may do, if that asks the same."""
    if question.raw or question.token_ids is not None or question.sampling.temperature != 0:
        return False
    if question.messages[-1].role != "user" or not 0 < len(question.last) <= settings.max_chars:
        return False
    return settings.multi_turn or all(message.role in ("system", "developer") for message in question.messages[:-1])


class ExactCache:
    """Never fails a request: what can't be read, is damaged or is from another version is a miss."""

    def __init__(self, store: Store, ttl_s: float, max_answer_bytes: int) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._max_bytes = max_answer_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Answer).decode

    async def get(self, question: Question) -> Answer | None:
        return await self.read(self.key(question))

    async def read(self, key: str) -> Answer | None:
        try:
            return self.decoded(await self._store.get(key))
        except StoreAway:
            return None

    async def of(self, question: Question, key: str) -> Answer | None:
        """The answer to another question of the same tenant and release. key: of that question. Raises `StoreAway`."""
        return self.decoded(await self._store.get(self._store.key(EXACT, question.tenant, question.name, key)))

    def decoded(self, value: bytes | None) -> Answer | None:
        """None as well for one that is damaged or of another version."""
        whole = unsealed(value)
        try:
            return None if whole is None else self._decode(_unpacked(whole, self._max_bytes))
        except (msgspec.DecodeError, zlib.error):
            return None

    async def put(self, question: Question, answer: Answer) -> bool:
        """Whether it is kept."""
        value = self._encode(answer)
        if len(value) > self._max_bytes:
            return False
        try:
            await self._store.set(self.key(question), sealed(_packed(value)), self._ttl_s)
        except StoreAway:
            log.debug("an answer was not stored")
            return False
        return True

    def key(self, question: Question) -> str:
        """Where in Redis: names first, so that what belongs to one is found again."""
        return self._store.key(EXACT, question.tenant, question.name, question.key)

    async def purge(self, tenant: str = "*", release: str = "*") -> int:
        """Deletes what is kept of a tenant, a release, both or all; the number of answers. Raises `StoreAway`."""
        await self._store.delete_all(self._store.key(SEMANTIC, tenant, release, "*"))
        if release == "*":  # blocks are of models, and no answers
            await self._store.delete_all(self._store.key(PROMPT, tenant, "*"))
        return await self._store.delete_all(self._store.key(EXACT, tenant, release, "*"))


def _packed(value: bytes) -> bytes:
    """Long ones are compressed, at the level that costs least."""
    return zlib.compress(value, 1) if len(value) > PLAIN_BYTES else value


def _unpacked(value: bytes, most: int) -> bytes:
    """MessagePack's arrays do not begin as compressed data does. Raises `zlib.error`."""
    return zlib.decompressobj().decompress(value, most) if value[:1] == ZLIB else value


def sealed(value: bytes) -> bytes:
    """With what tells a damaged value."""
    return _checksum(value) + value


def unsealed(value: bytes | None) -> bytes | None:
    """None as well for one that is damaged."""
    if value is None or _checksum(value[CHECKSUM_BYTES:]) != value[:CHECKSUM_BYTES]:
        return None
    return value[CHECKSUM_BYTES:]


def _checksum(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=CHECKSUM_BYTES).digest()
