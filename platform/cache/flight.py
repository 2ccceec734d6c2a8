"""Single flight: equal requests at the same time are one generation, in this process and across all that share the Redis.

The first to ask takes a lease in Redis, in the same step in which it finds that there is no answer yet, and generates. The others
follow: those of the same process as it comes, those of other processes through what the leader publishes, which it does only
while somebody asks for that. A lease that is not renewed ends, and one of the followers takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from gearshift.platform.cache.ahead import Ahead, Early
from gearshift.platform.cache.exact import Answer, ExactCache, Question
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.errors import EngineUnavailable
from gearshift.platform.request import Delta, FinishReason, Usage

LEASE_MS = 3000
TICK_S = 0.25
"""How often a process renews all its leases, in one step, and learns which of them are followed from elsewhere."""
PUBLISH_S = 0.1
POLL_S = 0.05
Part = Literal["hit", "semantic", "miss", "shared", "refresh"]
"""How a request got its answer: it was there, or that of another question was, it was generated for this one, or for another one,
or although it was there."""
Outcome = Literal["", "ended", "left", "alone"]
"""Of a flight. left: its leader went away, another one takes over. alone: it failed, and everybody tries by himself."""

LOOK = """
-- KEYS: answer, lease; ARGV: token, lease in ms. The answer, or whether the lease is now theirs; one of the same process gives
-- way.
local answer = redis.call('GET', KEYS[1])
if answer then return {answer, 0} end
local holder = redis.call('GET', KEYS[2])
if holder and string.sub(holder, 1, 32) ~= string.sub(ARGV[1], 1, 32) then return {false, 0} end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {false, 1}
"""
END = """
-- KEYS: lease, published; ARGV: token, what there is to publish, ms. Only the holder's.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] ~= '' then redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) end
return redis.call('DEL', KEYS[1])
"""
RENEW = """
-- KEYS: of each flight its lease and who wants it; ARGV: lease in ms, tokens. Of each, whether it is followed from elsewhere.
local wanted = {}
for place = 1, #KEYS / 2 do
  local lease, token = KEYS[2 * place - 1], ARGV[place + 1]
  local holder = redis.call('GET', lease)
  if not holder or holder == token then redis.call('SET', lease, token, 'PX', ARGV[1]) end
  wanted[place] = redis.call('EXISTS', KEYS[2 * place])
end
return wanted
"""
FOLLOW = """
-- KEYS: answer, lease, published, wanted; ARGV: ms. The answer, what is published, and whether anybody leads.
redis.call('SET', KEYS[4], '1', 'PX', ARGV[1])
return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[3]), redis.call('EXISTS', KEYS[2])}
"""


class Published(msgspec.Struct, frozen=True, array_like=True):
    """What other processes see of a flight."""

    pieces: tuple[str, ...]
    outcome: Outcome = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    ticket: str = ""


@dataclass(eq=False, slots=True)
class Flight:
    """One generation, as far as it came, and who waits for more of it."""

    question: Question
    token: str = ""
    """Of its lease; those of one process begin the same. One without is followed by nobody, and only kept."""
    deltas: list[Delta] = field(default_factory=list)
    outcome: Outcome = ""
    followers: int = 0
    published: int = -1
    """Deltas that were, and -1 for none."""
    own: bool = True
    """Its answer is to this very question, and not to one that asks the same: only then it is kept."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if self.followers:
            self._tell()

    def end(self, outcome: Outcome) -> None:
        self.outcome = self.outcome or outcome
        self._tell()

    def _tell(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def seen(self) -> Published:
        last = self.deltas[-1] if self.deltas else Delta("")
        pieces = tuple(delta.text for delta in self.deltas if delta.text)
        return Published(pieces, self.outcome, last.finish_reason, last.usage, last.ticket)


class Passed:
    """What a client of a shared answer has already, in case that somebody else begins it again."""

    def __init__(self) -> None:
        self.text = ""
        self._at = 0

    def again(self) -> None:
        """The answer comes from its beginning once more."""
        self._at = 0

    def rest(self, delta: Delta) -> Delta | None:
        """What of it is new, if anything. Raises `EngineUnavailable` where the answer is another one this time."""
        known = self.text[self._at : self._at + len(delta.text)]
        if not delta.text.startswith(known):
            raise EngineUnavailable("The answer that was being shared broke off, and can't be gone on with.")
        new = delta.text[len(known) :]
        self._at += len(delta.text)
        self.text += new
        if not known:
            return delta
        return msgspec.structs.replace(delta, text=new) if new or delta.finish_reason else None


class _Left(Exception):
    """The leader went away before its end."""


class _Alone(Exception):
    """The leader failed."""


class Similar(Protocol):
    """Knows questions that ask the same in other words. Never fails a request."""

    async def find(self, question: Question) -> Answer | None:
        """The answer to one."""

    def add(self, question: Question) -> None:
        """It has an answer by now."""


class Flights:
    """Owns the flights of this process: which it leads, and which it follows."""

    def __init__(self, store: Store, cache: ExactCache, similar: Similar | None = None) -> None:
        self._store = store
        self._cache = cache
        self._similar = similar
        self.ahead = Ahead(cache)
        self._me = uuid.uuid4().hex
        self._count = 0
        self._flying: dict[str, Flight] = {}
        self._leading: dict[str, Flight] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._following: dict[str, asyncio.Task[None]] = {}
        self._later: set[asyncio.Task[None]] = set()

    async def find(
        self, question: Question, literally: bool = False, early: Early | None = None
    ) -> tuple[Part, Answer | Flight | None]:
        """The answer, a flight that the caller leads from now on, inside of `led`, or None: somebody else is at it, `follow`.
        literally: no other question's answer will do. early: what `ahead` has begun to read."""
        if early is not None and (answer := await early.answer(self._cache.key(question))) is not None:
            return "hit", answer
        if question.key in self._flying:
            return "shared", None
        if (answer := await self._cache.get(question)) is not None:
            return "hit", answer
        flight, answer, leads = await self._join(question)
        if answer is not None:
            return "hit", answer
        if not leads:
            return "shared", None
        if (
            self._similar is not None
            and not literally
            and (answer := await self._ask(self._similar, flight)) is not None
        ):
            return "semantic", answer
        return "miss", flight

    async def _ask(self, similar: Similar, flight: Flight) -> Answer | None:
        """The answer to a question that asks the same, which ends the flight."""
        try:
            answer = await similar.find(flight.question)
        except BaseException:
            self._land(flight, "left")
            raise
        if answer is None:
            return None
        flight.own = False
        for delta in answer.deltas():
            flight.add(delta)
        self._land(flight, "ended")
        return answer

    @contextlib.contextmanager
    def led(self, flight: Flight | None) -> Iterator[None]:
        """Around the generation, of which every Delta is added to the flight. None is of no flight."""
        if flight is None:
            yield
            return
        outcome: Outcome = "left"  # by the client, or by this process
        try:
            yield
            outcome = "ended"
        except Exception:
            outcome = "alone"
            raise
        finally:
            self._land(flight, outcome)

    async def follow(
        self, question: Question, generate: Callable[[], AsyncGenerator[Delta, None]], told: Callable[[Part], None]
    ) -> AsyncGenerator[Delta, None]:
        """The answer that somebody else generates just now; when he goes away without its end, from whoever takes over, which may
        be `generate` here. told: how it came, before its first Delta. Raises what `generate` raises, and `EngineUnavailable`
        where an answer that has begun can't be gone on with."""
        passed, is_told = Passed(), False
        while True:
            flight, answer, leads = await self._join(question)
            if leads or answer is not None:
                break
            try:
                async with aclosing(self._watched(flight)) as deltas:
                    async for delta in deltas:
                        if not is_told:
                            is_told = True
                            told("shared")
                        if (new := passed.rest(delta)) is not None:
                            yield new
                return
            except _Left:
                passed.again()
            except _Alone:
                passed.again()
                flight, leads = Flight(question), False
                break
        told("hit" if answer is not None else "miss")
        if answer is not None:
            for delta in answer.deltas():
                if (new := passed.rest(delta)) is not None:
                    yield new
            return
        with self.led(flight if leads else None):
            async with aclosing(generate()) as deltas:
                async for delta in deltas:
                    flight.add(delta)
                    if (new := passed.rest(delta)) is not None:
                        yield new

    async def _join(self, question: Question) -> tuple[Flight, Answer | None, bool]:
        """The flight, the answer where it is known, and whether it is ours to generate; it is when Redis is away."""
        key = question.key
        if (known := self._flying.get(key)) is not None:
            return known, None, False
        self._count += 1
        flight = self._flying[key] = Flight(question, f"{self._me}{self._count}")
        try:
            keys = [self._cache.key(flight.question), self._lease(key)]
            raw, leads = await self._store.script(LOOK, keys, flight.token, str(LEASE_MS))
        except StoreAway:
            raw, leads = None, True
        except BaseException:
            self._close(key, flight, "left")
            raise
        answer = self._cache.decoded(raw)
        if answer is not None:
            flight.deltas += answer.deltas()
            self._close(key, flight, "ended")
        elif leads or raw is not None:  # a damaged one is generated anew
            self._leading[key] = flight
            if self._ticking is None or self._ticking.done():
                self._ticking = asyncio.create_task(self._tick())
            return flight, None, True
        else:
            self._following[key] = asyncio.create_task(self._watch(key, flight))
        return flight, answer, False

    def _land(self, flight: Flight, outcome: Outcome) -> None:
        """Of a flight that was led from here."""
        key = flight.question.key
        self._leading.pop(key, None)
        self._close(key, flight, outcome)
        task = asyncio.create_task(self._settle(key, flight))
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _watched(self, flight: Flight) -> AsyncGenerator[Delta, None]:
        """What comes until it ends. Raises `_Left`, `_Alone`."""
        flight.followers += 1
        passed = 0
        try:
            while True:
                while passed < len(flight.deltas):
                    passed += 1
                    yield _marked(flight.deltas[passed - 1])
                if flight.outcome:
                    break
                await flight.changed.wait()
        finally:
            flight.followers -= 1
            self._abandon(flight.question.key, flight)
        if flight.outcome != "ended":
            raise _Left if flight.outcome == "left" else _Alone

    def _abandon(self, key: str, flight: Flight) -> None:
        """Nobody in this process waits for another one's flight any more."""
        if not flight.followers and key in self._following and self._flying.get(key) is flight:
            self._close(key, flight, "left")

    def _close(self, key: str, flight: Flight, outcome: Outcome) -> None:
        if self._flying.get(key) is flight:
            del self._flying[key]
            watching = self._following.pop(key, None)
            if watching is not None and watching is not asyncio.current_task():
                watching.cancel()
        flight.end(outcome)

    async def _settle(self, key: str, flight: Flight) -> None:
        """Stores what may be stored, and gives the lease back."""
        if flight.outcome == "ended" and flight.own:
            await self._keep(flight)
        publish = msgspec.msgpack.encode(flight.seen()) if flight.published >= 0 and flight.outcome != "left" else b""
        with contextlib.suppress(StoreAway):
            keys = [self._lease(key), self._published(key)]
            await self._store.script(END, keys, flight.token, publish, str(LEASE_MS))

    async def _keep(self, flight: Flight) -> None:
        """What came whole, and was not blocked."""
        seen = flight.seen()
        if seen.finish_reason in ("stop", "length") and seen.usage is not None:
            answer = Answer(seen.pieces, seen.finish_reason, seen.usage)
            if await self._cache.put(flight.question, answer) and self._similar is not None:
                self._similar.add(flight.question)

    async def _tick(self) -> None:
        """While anything is led from here."""
        period = TICK_S
        while self._leading:
            await asyncio.sleep(period)
            period = TICK_S
            leading = dict(self._leading)
            keys = [name for key in leading for name in (self._lease(key), self._wanted(key))]
            with contextlib.suppress(StoreAway):
                tokens = [flight.token for flight in leading.values()]
                wanted = await self._store.script(RENEW, keys, str(LEASE_MS), *tokens) if keys else []
                for (key, flight), is_wanted in zip(leading.items(), wanted, strict=True):
                    if is_wanted:
                        period = PUBLISH_S
                        await self._publish(key, flight)

    async def _publish(self, key: str, flight: Flight) -> None:
        if flight.published < len(flight.deltas) and not flight.outcome:
            flight.published = len(flight.deltas)
            await self._store.set(self._published(key), msgspec.msgpack.encode(flight.seen()), LEASE_MS / 1000)

    async def _watch(self, key: str, flight: Flight) -> None:
        """Another process's flight, until it ends."""
        keys = [self._cache.key(flight.question), self._lease(key), self._published(key), self._wanted(key)]
        while not flight.outcome:
            try:
                raw, published, leads = await self._store.script(FOLLOW, keys, str(LEASE_MS))
            except StoreAway:
                self._close(key, flight, "left")
                return
            answer = self._cache.decoded(raw)
            seen = msgspec.msgpack.decode(published, type=Published) if published else None
            if answer is not None:
                self._take(flight, Published(answer.pieces, "ended", answer.finish_reason, answer.usage))
                self._close(key, flight, "ended")
            elif seen is not None:
                self._take(flight, seen)
                if seen.outcome or not leads:
                    self._close(key, flight, seen.outcome or "left")
            elif not leads:
                self._close(key, flight, "left")
            await asyncio.sleep(POLL_S)

    def _take(self, flight: Flight, seen: Published) -> None:
        """The pieces that are new, and the end."""
        for piece in seen.pieces[len(flight.deltas) :]:
            flight.add(Delta(piece))
        if seen.outcome == "ended" and seen.finish_reason is not None:
            flight.add(Delta("", seen.finish_reason, seen.usage, ticket=seen.ticket))

    async def settled(self) -> None:
        """Returns when what ended flights left for later has been done."""
        while self._later:
            await asyncio.wait(self._later)

    def _lease(self, key: str) -> str:
        return self._store.key("flight", key)

    def _published(self, key: str) -> str:
        return self._store.key("flight", key, "published")

    def _wanted(self, key: str) -> str:
        return self._store.key("flight", key, "wanted")


def _marked(delta: Delta) -> Delta:
    """As one that was generated for somebody else: its usage says that the prompt came from a cache."""
    if delta.usage is None:
        return Delta(delta.text, delta.finish_reason, ticket=delta.ticket)
    usage = Usage(delta.usage.prompt_tokens, delta.usage.completion_tokens, cached_tokens=delta.usage.prompt_tokens)
    return Delta(delta.text, delta.finish_reason, usage, ticket=delta.ticket)
