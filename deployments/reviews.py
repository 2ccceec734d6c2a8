"""What waits for a human, in Redis: tickets that end by themselves, and a log that stays. Nothing is decided here."""

from __future__ import annotations

import time

import msgspec

from gearshift.guardrails.review import Entry, Held, Status, Ticket, What, follows, opened
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.errors import Conflict, NotFound, StoreUnavailable
from gearshift.platform.openai import Identity, completion
from gearshift.platform.request import Delta, JsonObject
from gearshift.platform.tenants import Caller

WRITE = """
-- KEYS: ticket, its digest, index, log; ARGV: the ticket as it was ('' for a new one), as it is, its id, seconds, ms to keep it,
-- the log's last entry as it was, its next one. All of it or nothing: 0 where somebody else was first.
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] or (redis.call('LINDEX', KEYS[4], -1) or '') ~= ARGV[6] then return 0 end
if ARGV[1] == '' then
  if not redis.call('SET', KEYS[2], ARGV[3], 'NX', 'PX', ARGV[5]) then return 0 end
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[5])
  redis.call('ZADD', KEYS[3], ARGV[4], ARGV[3])
else
  redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL')
end
redis.call('RPUSH', KEYS[4], ARGV[7])
return 1
"""
LATEST = """
-- KEYS: index; ARGV: the oldest that is kept, in seconds, and how many. Ids, latest first.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. ARGV[1])
return redis.call('ZREVRANGE', KEYS[1], 0, ARGV[2] - 1)
"""
TRIES = 50
TICKET, INDEX, LOG = ("review", "ticket"), ("review", "index"), ("review", "log")
_encode = msgspec.msgpack.encode


class Reviews:
    """Every change is a ticket's and an entry's of the log, together."""

    def __init__(self, store: Store, keep_s: float) -> None:
        """keep_s: of a ticket, from when it is opened."""
        self._store = store
        self._keep_s = keep_s

    async def hold(self, held: Held) -> Ticket:
        """The ticket of this very exchange, which is opened if there is none. Raises `StoreUnavailable`: what can't be held can't
        pass either."""
        try:
            for _ in range(TRIES):
                known = await self._store.get(self._digest(held))
                if known is not None and (ticket := await self._read(known.decode())) is not None:
                    return ticket
                ticket = opened(held)
                if await self._write(None, ticket, "opened", "", ""):
                    return ticket
        except StoreAway as error:
            raise StoreUnavailable(
                "What has to be looked at can't be kept just now; try again.", retry_after_s=1.0
            ) from error
        raise StoreUnavailable("Too many exchanges wait to be looked at; try again.", retry_after_s=1.0)

    async def get(self, name: str) -> Ticket:
        """Raises `NotFound`, `StoreAway`."""
        ticket = await self._read(name)
        if ticket is None:
            raise NotFound(f"There is no ticket {name!r}, or it was kept for long enough.")
        return ticket

    async def picked_up(self, name: str, caller: Caller) -> Ticket:
        """By whoever asked. Raises as `get`; another tenant's ticket does not exist."""
        ticket = await self.get(name)
        if ticket.held.tenant != caller.tenant:
            raise NotFound(f"There is no ticket {name!r}, or it was kept for long enough.")
        while ticket.status == "approved" and ticket.held.answer:
            if await self._write(ticket, ticket, "picked_up", caller.tenant, ""):
                break
            ticket = await self.get(name)
        return ticket

    async def latest(self, most: int, status: Status | None = None) -> list[Ticket]:
        """Of the latest so many, those with the status; latest first. Raises `StoreAway`."""
        oldest = time.time() - self._keep_s
        ids = await self._store.script(LATEST, [self._store.key(*INDEX)], oldest, most)
        found = [await self._read(each.decode()) for each in ids]
        return [ticket for ticket in found if ticket is not None and status in (None, ticket.status)]

    async def decide(self, name: str, status: Status, who: str, why: str) -> Ticket:
        """Once and for all. Raises `NotFound`, `Conflict`, `StoreAway`."""
        assert status != "pending"
        for _ in range(TRIES):
            before = await self.get(name)
            if before.status != "pending":
                raise Conflict(f"{name} was {before.status} already, by {before.who or 'somebody'}.")
            after = msgspec.structs.replace(before, status=status, who=who, why=why, decided_at=time.time())
            if await self._write(before, after, status, who, why):
                return after
        raise Conflict("Others decide at the same time; try again.")

    async def log(self) -> list[Entry]:
        """All of it. Raises `StoreAway`."""
        return [_entry(each) for each in await self._store.list_all(self._store.key(*LOG))]

    async def _read(self, name: str) -> Ticket | None:
        found = await self._store.get(self._store.key(*TICKET, name))
        return msgspec.msgpack.decode(found, type=Ticket) if found else None

    async def _write(self, before: Ticket | None, after: Ticket, what: What, who: str, why: str) -> bool:
        """False where somebody else was first."""
        last = await self._store.list_last(self._store.key(*LOG))
        entry = follows(_entry(last) if last else None, after, what, who, why)
        keys = [
            self._store.key(*TICKET, after.id),
            self._digest(after.held),
            self._store.key(*INDEX),
            self._store.key(*LOG),
        ]
        kept_ms = int(self._keep_s * 1000)
        old = _encode(before) if before else b""
        facts = (old, _encode(after), after.id, after.at, kept_ms, last or b"", _encode(entry))
        return bool(await self._store.script(WRITE, keys, *facts))

    def _digest(self, held: Held) -> str:
        return self._store.key("review", "digest", held.digest)


def _entry(raw: bytes) -> Entry:
    return msgspec.msgpack.decode(raw, type=Entry)


def shown(ticket: Ticket) -> JsonObject:
    """For operators."""
    found: JsonObject = msgspec.to_builtins(ticket)
    return found


def told(ticket: Ticket) -> JsonObject:
    """For whoever asked: the answer once it may be seen."""
    held = ticket.held
    found: JsonObject = {"id": ticket.id, "object": "review", "created": int(ticket.at), "status": ticket.status}
    found |= {"stage": held.stage, "rule": held.rule, "reason": ticket.why, "completion": None}
    if ticket.status == "approved" and held.answer:
        identity = Identity(ticket.id.replace("rev_", "chatcmpl-"), held.release, "", int(ticket.at))
        found["completion"] = msgspec.json.decode(
            completion(identity, [Delta(held.answer, held.finish_reason or "stop", held.usage)])
        )
    return found
