"""Messages between a gateway and what computes for it, by direction of travel, and how they are framed.

One stream socket a pair carries all requests of that pair; what one engine step yields travels in one frame. A frame is
a 4-byte big-endian length and a MessagePack list of messages.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec

from gearshift.guardrails.tagger import Entity
from gearshift.platform.errors import EngineUnavailable, GearshiftError, all_errors, public
from gearshift.platform.request import Delta, EngineStats, Request

MAX_FRAME_BYTES = 64 * 1024**2


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    request: Request


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    id: str


class Piece(msgspec.Struct, tag="piece", array_like=True, frozen=True):
    id: str
    delta: Delta


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The request has ended with an error; `error` is the name of its class."""

    id: str
    error: str
    message: str
    param: str | None
    retry_after_s: float | None

    @classmethod
    def of(cls, request_id: str, error: BaseException) -> Failed:
        shown = public(error)
        return cls(request_id, type(shown).__name__, shown.message, shown.param, shown.retry_after_s)

    def exception(self) -> GearshiftError:
        kind = all_errors().get(self.error, EngineUnavailable)
        return kind(self.message, self.param, self.retry_after_s)


class Stats(msgspec.Struct, tag="stats", array_like=True, frozen=True):
    stats: EngineStats


class Draining(msgspec.Struct, tag="draining", array_like=True, frozen=True):
    """Finishes what it has; send nothing new."""


class Embed(msgspec.Struct, tag="embed", array_like=True, frozen=True):
    """Answered by `Vector`."""

    id: int
    text: str


class Find(msgspec.Struct, tag="find", array_like=True, frozen=True):
    """Of the known questions of a partition, the one that asks the same. Answered by `Found`."""

    id: int
    partition: str
    text: str


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """A question is known from now on. key: of its answer. Not answered."""

    partition: str
    key: str
    text: str
    ttl_s: float


class Remove(msgspec.Struct, tag="remove", array_like=True, frozen=True):
    """Its answer is gone. Not answered."""

    partition: str
    key: str


class Vector(msgspec.Struct, tag="vector", array_like=True, frozen=True):
    """Single floats; empty when it could not be computed."""

    id: int
    values: bytes


class Name(msgspec.Struct, tag="name", array_like=True, frozen=True):
    """What does a text name? Answered by `Named`."""

    id: int
    text: str


class Named(msgspec.Struct, tag="named", array_like=True, frozen=True):
    """entities: None when it could not be told."""

    id: int
    entities: tuple[Entity, ...] | None


class Found(msgspec.Struct, tag="found", array_like=True, frozen=True):
    """key: of the answer; empty for none."""

    id: int
    key: str


ToEngine = Submit | Abort
ToGateway = Piece | Failed | Stats | Draining
ToEncoder = Embed | Name | Find | Add | Remove
FromEncoder = Vector | Named | Found
Message = ToEngine | ToGateway | ToEncoder | FromEncoder

_encode = msgspec.msgpack.Encoder().encode
_decode_to_engine = msgspec.msgpack.Decoder(list[ToEngine]).decode
_decode_to_gateway = msgspec.msgpack.Decoder(list[ToGateway]).decode
_decode_to_encoder = msgspec.msgpack.Decoder(list[ToEncoder]).decode
_decode_from_encoder = msgspec.msgpack.Decoder(list[FromEncoder]).decode


class Outbox:
    """Collects messages and writes those of one turn of the event loop as one frame."""

    HEADER_BYTES: ClassVar[int] = 4

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._messages: list[Message] = []

    def send(self, message: Message) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(message)

    def _flush(self) -> None:
        frame = _encode(self._messages)
        self._messages.clear()
        if not self._writer.is_closing():
            self._writer.write(len(frame).to_bytes(self.HEADER_BYTES, "big") + frame)

    def close(self) -> None:
        self._writer.close()


async def _read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """None when the peer is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(Outbox.HEADER_BYTES), "big")
        return await reader.readexactly(length) if length <= MAX_FRAME_BYTES else None
    except (asyncio.IncompleteReadError, OSError):
        return None


async def read_to_engine(reader: asyncio.StreamReader) -> list[ToEngine] | None:
    frame = await _read_frame(reader)
    return None if frame is None else _decode_to_engine(frame)


async def read_to_gateway(reader: asyncio.StreamReader) -> list[ToGateway] | None:
    frame = await _read_frame(reader)
    return None if frame is None else _decode_to_gateway(frame)


async def read_to_encoder(reader: asyncio.StreamReader) -> list[ToEncoder] | None:
    frame = await _read_frame(reader)
    return None if frame is None else _decode_to_encoder(frame)


async def read_from_encoder(reader: asyncio.StreamReader) -> list[FromEncoder] | None:
    frame = await _read_frame(reader)
    return None if frame is None else _decode_from_encoder(frame)
