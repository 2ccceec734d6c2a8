"""Applied configs: an append-only list in Redis, and which of them serves. Written by compare-and-set, so that two operators
can't overwrite each other, and finished or undone by whoever finds one half applied."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

import msgspec

from gearshift.platform import config_file
from gearshift.platform.cache.store import Store
from gearshift.platform.config import Config
from gearshift.platform.errors import Conflict, NotFound

Kind = Literal["serve", "apply", "rollback"]
Outcome = Literal["", "applied", "undone"]

BEGIN = """
-- KEYS: head, revisions; ARGV: serving expected, number of the new one, revision. 1 if it was begun.
local serving = redis.call('HGET', KEYS[1], 'serving') or '0'
local target = redis.call('HGET', KEYS[1], 'target') or '0'
if serving ~= ARGV[1] or target ~= serving then return 0 end
if redis.call('LLEN', KEYS[2]) + 1 ~= tonumber(ARGV[2]) then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], 'target', ARGV[2], 'active', serving)
return 1
"""


class Revision(msgspec.Struct, frozen=True):
    """One applied config, as JSON with every default filled in."""

    number: int
    at: float
    who: str
    why: str
    kind: Kind
    config: bytes
    of: int = 0
    """The revision that a roll back went back to."""

    def parsed(self) -> Config:
        """Raises `ConfigError` where this program no longer takes it."""
        return config_file.parse(self.config.decode(), f"revision {self.number}")


class Head(msgspec.Struct, frozen=True):
    """serving: the last one that was applied whole. target: the one that is being applied, else the same. active: the one
    that the gateways serve with. outcome: of the last that was begun."""

    serving: int = 0
    target: int = 0
    active: int = 0
    outcome: Outcome = ""
    problem: str = ""

    @property
    def settled(self) -> bool:
        return self.serving == self.target


class Revisions:
    """Reads and writes them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._head = store.key("head")
        self._list = store.key("revisions")

    async def head(self) -> Head:
        """Raises `StoreAway`, as everything here."""
        found = {name: value.decode() for name, value in (await self._store.hash_all(self._head)).items()}
        numbers = {name: int(found.get(name, 0)) for name in ("serving", "target", "active")}
        outcome: Outcome = found.get("outcome", "")  # type: ignore[assignment]  # only `_settle` writes it
        return Head(**numbers, outcome=outcome, problem=found.get("problem", ""))

    async def all(self) -> list[Revision]:
        """Oldest first; the number is the place, from 1."""
        return [msgspec.msgpack.decode(raw, type=Revision) for raw in await self._store.list_all(self._list)]

    async def get(self, number: int) -> Revision:
        """Raises `NotFound`."""
        found = await self.all()
        if not 1 <= number <= len(found):
            raise NotFound(f"There is no revision {number}; the last one is {len(found)}.")
        return found[number - 1]

    async def begin(self, config: Config, based_on: int, who: str, why: str, kind: Kind, of: int = 0) -> Revision:
        """Writes it down as the target. Raises `Conflict` when another one serves than it is based on, or is being applied."""
        number = len(await self.all()) + 1
        new = Revision(number, time.time(), who, why, kind, dumped(config), of)
        if not await self._store.script(
            BEGIN, [self._head, self._list], str(based_on), str(number), msgspec.msgpack.encode(new)
        ):
            head = await self.head()
            if not head.settled:
                raise Conflict(f"Revision {head.target} is being applied; wait for it.")
            raise Conflict(
                f"Revision {head.serving} serves by now, and this was planned against {based_on}; look at the plan again."
            )
        return new

    async def activate(self, number: int, weights: Mapping[str, str]) -> None:
        """From now on gateways serve with it. weights: the revision of each model's."""
        encoded = msgspec.json.encode(dict(weights))
        await self._store.hash_set_many(self._head, "active", str(number), "weights", encoded)

    async def active(self) -> tuple[Revision, dict[str, str]]:
        """What gateways serve with, and the revisions of its weights."""
        raw = (await self._store.hash_all(self._head)).get("weights", b"{}")
        return await self.get((await self.head()).active), msgspec.json.decode(raw, type=dict[str, str])

    async def finish(self, number: int) -> None:
        """It serves whole."""
        await self._settle(number, "applied", "")

    async def undo(self, back_to: int, problem: str) -> None:
        """The one that was begun serves nobody, and `back_to` does as before."""
        await self._settle(back_to, "undone", problem)

    async def _settle(self, number: int, outcome: Outcome, problem: str) -> None:
        await self._store.hash_set_many(
            self._head, "serving", str(number), "target", str(number), "outcome", outcome, "problem", problem
        )


def dumped(config: Config) -> bytes:
    return config.model_dump_json().encode()
