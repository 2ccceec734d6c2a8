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
-- KEYS: tickets, digests, index, log; ARGV: id, digest, the ticket as it was ('' for a new one), as it is, whose the digest was
-- ('' for nobody's), seconds, the log's last entry as it was, its next one. All or nothing: 0 where somebody else was first.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[3] then return 0 end
if (redis.call('LINDEX', KEYS[4], -1) or '') ~= ARGV[7] then return 0 end
if ARGV[3] == '' then
  if (redis.call('HGET', KEYS[2], ARGV[2]) or '') ~= ARGV[5] then return 0 end
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[1])
  redis.call('ZADD', KEYS[3], ARGV[6], ARGV[1] .. ':' .. ARGV[2])
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[4])
redis.call('RPUSH', KEYS[4], ARGV[8])
return 1
"""
FORGET = """
-- KEYS: tickets, digests, index; ARGV: the oldest that is kept, in seconds. Forgets some of those that are older.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', '(' .. ARGV[1], 'LIMIT', 0, 100)) do
  local id, digest = string.match(member, '([^:]*):(.*)')
  redis.call('HDEL', KEYS[1], id)
  if redis.call('HGET', KEYS[2], digest) == id then redis.call('HDEL', KEYS[2], digest) end
  redis.call('ZREM', KEYS[3], member)
end
"""
LATEST = "return redis.call('ZREVRANGE', KEYS[1], 0, ARGV[1] - 1)"
TRIES = 50
PARTS = ("tickets", "digests", "index", "log")
"""Keys without an expiry: a Redis that runs out of memory gives up cached answers, and none of these."""
_encode = msgspec.msgpack.encode


class Reviews:
    """Every change is a ticket's and an entry's of the log, together."""

    def __init__(self, store: Store, keep_s: float) -> None:
        """keep_s: of a ticket, from when it is opened."""
        self._store = store
        self._keep_s = keep_s
        self._keys = [store.key("review", part) for part in PARTS]

    async def hold(self, held: Held) -> Ticket:
        """The ticket of this very exchange, which is opened if there is none. Raises `StoreUnavailable`: what can't be held can't
        pass either."""
        try:
            for _ in range(TRIES):
                known = await self._store.hash_get(self._keys[1], held.digest)
                if known is not None and (ticket := await self._read(known.decode())) is not None:
                    return ticket
                ticket = opened(held)
                if await self._write(None, ticket, "opened", "", "", known or b""):
                    await self._store.script(FORGET, self._keys[:3], time.time() - self._keep_s)
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
        members = await self._store.script(LATEST, [self._keys[2]], most)
        found = [await self._read(each.decode().partition(":")[0]) for each in members]
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
        return [_entry(each) for each in await self._store.list_all(self._keys[3])]

    async def _read(self, name: str) -> Ticket | None:
        found = await self._store.hash_get(self._keys[0], name)
        ticket = msgspec.msgpack.decode(found, type=Ticket) if found else None
        return ticket if ticket is not None and ticket.at + self._keep_s > time.time() else None

    async def _write(
        self, before: Ticket | None, after: Ticket, what: What, who: str, why: str, whose: bytes = b""
    ) -> bool:
        """False where somebody else was first. whose: the ticket that the digest of a new one belonged to."""
        last = await self._store.list_last(self._keys[3])
        entry = follows(_entry(last) if last else None, after, what, who, why)
        old = _encode(before) if before else b""
        facts = (after.id, after.held.digest, old, _encode(after), whose, after.at, last or b"", _encode(entry))
        return bool(await self._store.script(WRITE, self._keys, *facts))


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
