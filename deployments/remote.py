"""The gateway's end of the wire: an `Engine` whose work is done by the replicas of one model."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from gearshift.deployments.balance import CHARS_PER_TOKEN, CHUNK, Choose, Held, Option, chain, choose, prompt_tokens
from gearshift.deployments.hold import Hold
from gearshift.deployments.meeting import connect
from gearshift.deployments.wire import Abort, Draining, Failed, Outbox, Piece, Stats, Submit, read_to_gateway
from gearshift.platform.engine.inbox import Inbox, read
from gearshift.platform.errors import EngineUnavailable, GearshiftError, Overloaded
from gearshift.platform.request import Delta, EngineStats, Request
from gearshift.platform.telemetry import RESUMED

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2.0
RESUME_WAIT_S = 10.0
"""How long a stream that has begun waits for a replica to go on at."""
RESUME_LOOK_S = 0.05
MOST_RESUMES = 2
"""Of one stream: if it is the request that brings engines down, it must not take all of them."""


class Replica:
    """One connection to one engine replica, shared by all requests this gateway has there."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._outbox = Outbox(writer)
        self._streams: dict[str, Inbox] = {}
        self._reading = asyncio.create_task(self._read(reader))
        self.stats = EngineStats()
        self.draining = False
        self.connected = True
        self.held = Held()
        self._since: dict[str, int] = {}
        """Tokens of each request that we sent since it last told what is queued, and that has not begun."""

    @classmethod
    async def connect(cls, address: str, secret: str) -> Replica:
        return cls(*await connect(address, secret))

    @property
    def usable(self) -> bool:
        return self.connected and not self.draining

    def option(self, hashes: Sequence[bytes]) -> Option:
        """What it has to do, by what it last told and what we know we sent since."""
        matched = self.held.matched(hashes) * CHUNK // CHARS_PER_TOKEN
        streams = max(len(self._streams), self.stats.running + self.stats.waiting)
        return Option(self.stats.queued_tokens + sum(self._since.values()), matched, streams)

    def took(self, request: Request, hashes: Sequence[bytes], tokens: int) -> None:
        """The request goes there, and so many tokens of it are not held there."""
        self._since[request.id] = tokens
        self.held.add(hashes, self.stats.kv_tokens_total)

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        if not self.connected:
            raise _lost()
        inbox: Inbox = asyncio.Queue()
        self._streams[request.id] = inbox
        self._outbox.send(Submit(request))
        try:
            async for delta in read(inbox):  # owns nothing that must be closed
                yield delta
        finally:
            if self._streams.pop(request.id, None) is not None and self.connected:
                self._outbox.send(Abort(request.id))

    def close(self) -> None:
        self._reading.cancel()
        self._lose()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (messages := await read_to_gateway(reader)) is not None:
                for message in messages:
                    self._take(message)
        finally:
            self._lose()

    def _take(self, message: Piece | Failed | Stats | Draining) -> None:
        match message:
            case Piece(request_id, delta):
                self._since.pop(request_id, None)
                inbox = self._streams.pop(request_id, None) if delta.finish_reason else self._streams.get(request_id)
                if inbox is not None:
                    inbox.put_nowait(delta)
            case Failed(request_id):
                if (inbox := self._streams.pop(request_id, None)) is not None:
                    inbox.put_nowait(message.exception())
            case Stats(stats):
                self.stats = stats
                self._since.clear()
            case Draining():
                self.draining = True

    def _lose(self) -> None:
        """The replica is gone: everybody who waits for it learns so at once."""
        self.connected = False
        self._outbox.close()
        streams, self._streams = self._streams, {}
        for inbox in streams.values():
            inbox.put_nowait(_lost())


def _lost() -> EngineUnavailable:
    return EngineUnavailable("The replica that worked on the request is gone.", retry_after_s=RETRY_AFTER_S)


class SoFar:
    """What a request has been answered, in case that its replica is lost: another one goes on from the same tokens, which it
    reads like a prompt. With the seed that the request came with or was given, it goes on as the first would have."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._ids: list[int] = []
        self._chars = 0
        self.started = False
        self.resumes = 0
        self.lost = False
        """It can't be gone on with: nobody told the tokens, or more than their text was told."""

    def add(self, delta: Delta) -> None:
        self.started = True
        self._ids += delta.ids
        self._chars += 0 if delta.echo else len(delta.text)
        sampling = self.request.sampling
        self.lost |= len(delta.ids) < delta.tokens or sampling.certainty or sampling.logprobs is not None or delta.echo

    def rest(self) -> Request:
        if not self.started:
            return self.request
        return replace(self.request, resume=tuple(self._ids), sent=self._chars)


class RemoteEngine:
    """The Engine protocol over the replicas of one model. Owns the connections.

    A request whose replica is lost moves on to another one, also when it has begun; so does one that found it full. One that
    finds no replica waits for the first, where there is a place to wait.
    """

    def __init__(self, model: str, choose: Choose = choose, hold: Hold | None = None, secret: str = "") -> None:
        """hold: for a model that may be without a replica; without it, such a request fails. secret: of the deployment, for
        replicas on other nodes."""
        self._model = model
        self._pick = choose
        self.hold = hold
        self._secret = secret
        self._replicas: dict[str, Replica] = {}

    @property
    def ready(self) -> bool:
        return any(replica.usable for replica in self._replicas.values())

    @property
    def held(self) -> int:
        """Requests that wait for the first replica."""
        return self.hold.count if self.hold else 0

    @property
    def stage(self) -> str:
        return self.hold.stage if self.hold and not self.ready else ""

    async def refresh(self, addresses: Iterable[str], starting: str = "") -> None:
        """starting: what a replica that is not listed yet is at.

        Connects to replicas that are new. One that is no longer listed stays while its connection does: the
        connection itself is the best proof of life."""
        for gone in [address for address, replica in self._replicas.items() if not replica.connected]:
            del self._replicas[gone]
        for address in addresses:
            if address not in self._replicas:
                try:
                    self._replicas[address] = await Replica.connect(address, self._secret)
                except OSError:
                    log.debug("%s: replica at %s does not answer", self._model, address)
        if self.hold:
            self.hold.told(self.ready, starting)

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        if request.sampling.seed is None:
            request = replace(request, seed=random.getrandbits(63))
        if self.hold and not self.ready:
            await self.hold.wait()
        tried: set[Replica] = set()
        so_far = SoFar(request)
        failure: GearshiftError = EngineUnavailable("No replica of this model is up.", retry_after_s=RETRY_AFTER_S)
        hashes = chain(request) if len(self._replicas) > 1 else []
        while (replica := await self._next(tried, so_far, hashes)) is not None:
            tried.add(replica)
            try:
                async with aclosing(replica.generate(so_far.rest())) as deltas:
                    async for delta in deltas:
                        so_far.add(delta)
                        yield delta
                return
            except (EngineUnavailable, Overloaded) as error:
                so_far.resumes += so_far.started
                if so_far.lost or so_far.resumes > MOST_RESUMES:
                    raise
                failure = error
        raise failure

    async def _next(self, tried: set[Replica], so_far: SoFar, hashes: Sequence[bytes]) -> Replica | None:
        """A replica that was not tried. One that is begun and lost is worth a wait for a replica that comes up."""
        deadline = time.monotonic() + (RESUME_WAIT_S if so_far.started else 0.0)
        while (replica := self._choose(tried, so_far.request, hashes)) is None and time.monotonic() < deadline:
            await asyncio.sleep(RESUME_LOOK_S)
        if replica is not None and so_far.started:
            RESUMED.labels(self._model).inc()
        return replica

    def stats(self) -> EngineStats:
        each = [replica.stats for replica in self._replicas.values() if replica.connected]
        return EngineStats(
            **{name: sum(getattr(stats, name) for stats in each) for name in EngineStats.__dataclass_fields__}
        )

    async def close(self) -> None:
        for replica in self._replicas.values():
            replica.close()

    def _choose(self, tried: set[Replica], request: Request, hashes: Sequence[bytes]) -> Replica | None:
        usable = {address: each for address, each in self._replicas.items() if each.usable and each not in tried}
        if not usable:
            return None
        replicas, tokens = list(usable.values()), prompt_tokens(request)
        options = [replica.option(hashes) for replica in replicas]
        key = request.session.encode() or (hashes[0] if hashes else random.randbytes(8))
        place = self._pick(options, tokens, list(usable), key)
        replicas[place].took(request, hashes, max(0, tokens - options[place].matched))
        return replicas[place]
