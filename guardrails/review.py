"""What waits for a human: a ticket an exchange, and a log in which nothing can be changed unseen.

Each entry of the log holds the hash of the one before (as in Haber & Stornetta 1991, J. Cryptology 3): whoever knows the last
hash can tell whether anything before it was changed, left out, or put in.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from gearshift.guardrails.verdict import Stage
from gearshift.platform.request import FinishReason, Message, Usage

Status = Literal["pending", "approved", "rejected"]
What = Literal["opened", "approved", "rejected", "picked_up"]
START = "0" * 64
_encode = msgspec.json.Encoder(order="sorted").encode


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange that a rule wants to be looked at, with what the other rules take out taken out. answer: empty where the
    question is what waits."""

    tenant: str
    release: str
    policy: str
    """With its version."""
    rule: str
    stage: Stage
    messages: tuple[Message, ...]
    answer: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    @property
    def digest(self) -> str:
        """Of what is judged: the same again is the same ticket."""
        judged = [self.tenant, self.release, self.policy, self.stage, self.messages, self.answer]
        return hashlib.sha256(_encode(judged)).hexdigest()


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    at: float
    """Seconds since 1970."""
    held: Held
    status: Status = "pending"
    who: str = ""
    why: str = ""
    decided_at: float = 0.0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Of the log. before: hash of the entry before, `START` for the first."""

    number: int
    at: float
    ticket: str
    what: What
    who: str
    why: str
    rule: str
    policy: str
    tenant: str
    before: str

    @property
    def hash(self) -> str:
        return hashlib.sha256(_encode(self)).hexdigest()


def opened(held: Held) -> Ticket:
    return Ticket(id=f"rev_{secrets.token_hex(12)}", at=time.time(), held=held)


def follows(last: Entry | None, ticket: Ticket, what: What, who: str, why: str) -> Entry:
    """The entry after the last one."""
    return Entry(
        number=last.number + 1 if last else 1,
        at=time.time(),
        ticket=ticket.id,
        what=what,
        who=who,
        why=why,
        rule=ticket.held.rule,
        policy=ticket.held.policy,
        tenant=ticket.held.tenant,
        before=last.hash if last else START,
    )


def broken(entries: Sequence[Entry]) -> int | None:
    """Number of the first entry that does not follow the one before; None for a whole log."""
    before = START
    for number, entry in enumerate(entries, 1):
        if entry.before != before or entry.number != number:
            return number
        before = entry.hash
    return None
