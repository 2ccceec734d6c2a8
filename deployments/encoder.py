"""The process that knows what texts mean: it turns them into vectors, several at a time, and keeps the semantic cache's index.

Gateways load no encoder: they ask by one socket (wire.py), and go on without an answer that does not come in time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gearshift.deployments import registry
from gearshift.deployments.meeting import connect, listen
from gearshift.deployments.registry import Member
from gearshift.deployments.wire import (
    Add,
    Embed,
    Find,
    Found,
    FromEncoder,
    Name,
    Named,
    Outbox,
    Remove,
    ToEncoder,
    Vector,
    read_from_encoder,
    read_to_encoder,
)
from gearshift.guardrails import tagger
from gearshift.guardrails.tagger import Entity
from gearshift.platform.cache.exact import Answer, ExactCache, Question, comparable
from gearshift.platform.cache.store import StoreAway
from gearshift.platform.config import Config, Embedding, Semantic
from gearshift.platform.errors import ConfigError, EngineUnavailable
from gearshift.platform.telemetry import CACHE

if TYPE_CHECKING:
    from gearshift.deployments.replicas import Place
    from gearshift.platform.cache.semantic import SemanticIndex
    from gearshift.platform.embedding import Embedder

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]
Made = TypeVar("Made")
REMEMBERED = 4096
"""Texts whose vectors are kept for a while: one request asks for the same one several times."""
LONGEST = 8000
"""Characters that are looked at; the encoder itself reads its first few hundred tokens."""


class Batches(Generic[Made]):
    """Texts to what is made of each: what arrives while a batch is computed makes the next one."""

    def __init__(self, compute: Callable[[Sequence[str]], Sequence[Made]], most: int) -> None:
        """compute: of n texts; runs in a thread."""
        self._compute = compute
        self._most = most
        self._waiting: dict[str, asyncio.Future[Made]] = {}
        self._known: OrderedDict[str, Made] = OrderedDict()
        self._working: asyncio.Task[None] | None = None

    async def of(self, text: str) -> Made:
        """Raises what `compute` raises."""
        if (known := self._known.get(text)) is not None:
            self._known.move_to_end(text)
            return known
        future = self._waiting.get(text)
        if future is None:
            future = self._waiting[text] = asyncio.get_running_loop().create_future()
            if self._working is None or self._working.done():
                self._working = asyncio.create_task(self._work())
        return await asyncio.shield(future)

    async def _work(self) -> None:
        while self._waiting:
            texts = list(itertools.islice(self._waiting, self._most))
            try:
                made = await asyncio.to_thread(self._compute, texts)
            except Exception as error:
                for text in texts:
                    self._waiting.pop(text).set_exception(error)
                continue
            for text, each in zip(texts, made, strict=True):
                self._known[text] = each
                self._waiting.pop(text).set_result(each)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)


class EncoderServer:
    """Answers every gateway that connects."""

    def __init__(
        self,
        vectors: Batches[Floats],
        semantic: SemanticIndex | None,
        entities: Batches[tuple[Entity, ...]] | None = None,
    ) -> None:
        """entities: None where nobody can tell them."""
        self._vectors = vectors
        self._entities = entities
        self._semantic = semantic
        self._servers: list[asyncio.Server] = []
        self._peers: set[Outbox] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, path: Path, host: str = "", secret: str = "") -> str:
        """host: where gateways of other nodes may come from too, if they know the secret. Returns HOST:PORT of that."""
        remote = ""
        self._servers.append(await asyncio.start_unix_server(self._serve, path))
        if host:
            server, remote = await listen(self._serve, host, secret)
            self._servers.append(server)
        return remote

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        for peer in self._peers:
            peer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Outbox(writer)
        self._peers.add(peer)
        try:
            while (messages := await read_to_encoder(reader)) is not None:
                for message in messages:
                    task = asyncio.create_task(self._answer(peer, message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            self._peers.discard(peer)
            peer.close()

    async def _answer(self, peer: Outbox, message: ToEncoder) -> None:
        """What can't be done is answered with nothing: whoever asks has a plan for that."""
        try:
            match message:
                case Embed(number, text):
                    peer.send(Vector(number, (await self._vectors.of(text[:LONGEST])).tobytes()))
                case Name(number, text):
                    read = self._entities is not None and len(text) <= tagger.MAX_CHARS
                    peer.send(Named(number, await self._entities.of(text) if self._entities and read else None))
                case Find(number, partition, text):
                    key = await self._semantic.find(partition, text) if self._semantic else None
                    peer.send(Found(number, key or ""))
                case Add(partition, key, text, ttl_s) if self._semantic:
                    await self._semantic.add(partition, key, text, ttl_s)
                case Remove(partition, key) if self._semantic:
                    await self._semantic.remove(partition, key)
        except Exception as error:
            if not isinstance(error, StoreAway):
                log.exception("the encoder failed")
            match message:
                case Embed(number):
                    peer.send(Vector(number, b""))
                case Name(number):
                    peer.send(Named(number, None))
                case Find(number):
                    peer.send(Found(number, ""))


class EncoderReplica:
    """What Serve keeps alive; see targets.py."""

    async def __init__(self, config: Config, place: Place) -> None:  # type: ignore[misc]  # Serve awaits it
        assert config.embedding is not None
        self._place = place
        self._store = place.store(registry.STALE_S)
        self._name = f"encoder-{uuid.uuid4().hex[:8]}"
        self._node, self._path, self._remote = place.node(), place.folder / f"{self._name}.sock", ""
        self._stage = "loading the encoder"
        place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tasks = [asyncio.create_task(registry.beat(self._store, self._member))]
        embedder, revision = await asyncio.to_thread(_load, config.embedding)
        vectors = Batches[Floats](lambda texts: list(embedder.embed(texts)), config.embedding.max_batch)
        read = _reader(embedder, config.embedding)
        entities = Batches(read, config.embedding.max_batch) if read else None
        self._semantic: SemanticIndex | None = None
        if config.cache.semantic is not None:
            self._stage = "loading known questions"
            self._semantic = _semantic(
                config.embedding, config.cache.semantic, self._store, vectors, revision, embedder.width
            )
            self._tasks.append(asyncio.create_task(self._remember(self._semantic)))
        self._server = EncoderServer(vectors, self._semantic, entities)
        self._remote = await self._server.start(self._path, self._node, place.secret)
        self._stage = ""

    async def _remember(self, semantic: SemanticIndex) -> None:
        """What was known before this process began; then forgets what Redis forgets."""
        while True:
            try:
                log.info("%d known questions", await semantic.load())
                break
            except StoreAway:
                await asyncio.sleep(registry.BEAT_S)
        await semantic.run()

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        if any(task.done() for task in self._tasks):
            raise EngineUnavailable("A task of the encoder has ended.")

    async def __del__(self) -> None:
        """Called by Serve when the replica is to go."""
        if not hasattr(self, "_server"):  # it never came up
            return
        for task in self._tasks:
            task.cancel()
        await registry.leave(self._store, self._name)
        await self._server.close()
        if self._semantic is not None:
            await self._semantic.close()
        await self._store.close()
        self._path.unlink(missing_ok=True)

    def _member(self) -> Member:
        return Member(
            name=self._name,
            model=registry.ENCODER,
            address="" if self._stage else str(self._path),
            remote=self._remote,
            node=self._node,
            stage=self._stage,
        )


def _reader(embedder: Embedder, settings: Embedding) -> Callable[[Sequence[str]], list[tuple[Entity, ...]]] | None:
    """What tells entities; None where no tagger knows this encoder, which a policy that needs one was refused for."""
    try:
        made = tagger.tagger_of(settings)
    except ConfigError:
        return None

    def read(texts: Sequence[str]) -> list[tuple[Entity, ...]]:
        places = [tagger.words(text) for text in texts]
        states = embedder.words(texts, places)
        return [tuple(made.tag(*each)) for each in zip(texts, places, states, strict=True)]

    return read


def _load(settings: Embedding) -> tuple[Embedder, str]:
    """With the revision of its weights."""
    import torch

    from gearshift.platform.embedding import Embedder
    from gearshift.platform.weights import source

    torch.set_num_threads(settings.threads)
    weights = source.ensure(source.parse(settings.source))
    return Embedder(weights.path, settings.device), weights.revision


def _semantic(
    encoder: Embedding, settings: Semantic, store: Any, vectors: Batches[Floats], revision: str, width: int
) -> SemanticIndex:
    from gearshift.platform.cache import verifier
    from gearshift.platform.cache.index import VectorIndex
    from gearshift.platform.cache.semantic import SemanticIndex

    key = os.environ[settings.api_key_env] if settings.api_key_env else None
    index = VectorIndex(width, f"{store.namespace}-{revision}", settings.max_entries, settings.url, key)
    judge = verifier.load(Path(settings.verifier or verifier.SHIPPED), encoder.source)
    return SemanticIndex(store, index, judge, lambda text: vectors.of(text[:LONGEST]), revision, settings.candidates)


class Encoder:
    """A gateway's end. Owns one connection; while there is none, nobody gets an answer, at once."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._outbox: Outbox | None = None
        self._reading: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[FromEncoder]] = {}
        self._numbers = itertools.count()

    @property
    def ready(self) -> bool:
        return self._outbox is not None

    async def meet(self, members: Sequence[Member], node: str) -> None:
        """Connects to the first encoder that is up, unless it is connected."""
        address = next((m.reached_from(node) for m in members if m.model == registry.ENCODER and not m.stage), "")
        if self.ready or not address:
            return
        try:
            reader, writer = await connect(address, self._secret)
        except OSError:
            log.debug("the encoder at %s does not answer", address)
            return
        self._outbox = Outbox(writer)
        self._reading = asyncio.create_task(self._read(reader))

    async def embed(self, text: str, timeout_s: float) -> Floats | None:
        """[width], length one. None when it does not come in time."""
        reply = await self._ask(lambda number: Embed(number, text), timeout_s)
        return np.frombuffer(reply.values, np.float32) if isinstance(reply, Vector) and reply.values else None

    def embed_within(self, timeout_s: float) -> Callable[[str, float | None], Awaitable[tuple[float, ...]]]:
        """As a pipeline asks: for a vector in so many seconds, or in its own; empty when it does not come."""

        async def embed(text: str, own_s: float | None) -> tuple[float, ...]:
            vector = await self.embed(text, own_s or timeout_s)
            return () if vector is None else tuple(vector.tolist())

        return embed

    async def name(self, text: str, timeout_s: float) -> tuple[Entity, ...] | None:
        """What a text names. None when it does not come in time."""
        reply = await self._ask(lambda number: Name(number, text), timeout_s)
        return reply.entities if isinstance(reply, Named) else None

    async def find(self, partition: str, text: str, timeout_s: float) -> str | None:
        """The key of a known question that asks the same, "" where there is none; None when no answer comes in time."""
        reply = await self._ask(lambda number: Find(number, partition, text), timeout_s)
        return reply.key if isinstance(reply, Found) else None

    def tell(self, message: Add | Remove) -> None:
        """Lost when nobody is there."""
        if self._outbox is not None:
            self._outbox.send(message)

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._lose()

    async def _ask(self, message: Callable[[int], Embed | Name | Find], timeout_s: float) -> FromEncoder | None:
        if self._outbox is None:
            return None
        number = next(self._numbers)
        future: asyncio.Future[FromEncoder] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._outbox.send(message(number))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except (TimeoutError, ConnectionError):
            return None
        finally:
            del self._asked[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (messages := await read_from_encoder(reader)) is not None:
                for message in messages:
                    future = self._asked.get(message.id)
                    if future is not None and not future.done():
                        future.set_result(message)
        finally:
            self._lose()

    def _lose(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionError("the encoder is gone"))


class SimilarAnswers:
    """`flight.Similar`: asks the encoder which question is the same, and Redis for its answer."""

    def __init__(self, encoder: Encoder, cache: ExactCache, settings: Semantic, timeout_s: float, ttl_s: float) -> None:
        self._encoder = encoder
        self._cache = cache
        self._settings = settings
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s

    async def find(self, question: Question) -> Answer | None:
        if not comparable(question, self._settings):
            return None
        found, result = None, "miss"
        key = await self._encoder.find(question.partition, question.last, self._timeout_s)
        if key is None:
            result = "away"
        elif key:
            try:
                found = await self._cache.of(question, key)
            except StoreAway:
                result = "away"
            else:
                result = "hit" if found else "gone"
        if result == "gone":
            self._encoder.tell(Remove(question.partition, key or ""))
        CACHE.labels("semantic", result).inc()
        return found

    def add(self, question: Question) -> None:
        if comparable(question, self._settings):
            self._encoder.tell(Add(question.partition, question.key, question.last, self._ttl_s))
