"""Requests and tokens a minute of each tenant, counted in Redis so that all gateways share one count."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, NamedTuple

from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Limits
from gearshift.platform.errors import LimitsUnavailable, RateLimited

SCRIPT = files("gearshift.platform.cache").joinpath("limits.lua").read_text()


SETTLE_EVERY_S = 0.05


class Allowance(NamedTuple):
    """What is left of a minute's limit, and in how many seconds it is whole again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens set aside for one request until it is known how many it used."""

    tenant: str
    limits: Limits
    tokens: int = 0
    requests_left: Allowance | None = None
    tokens_left: Allowance | None = None

    @property
    def used_share(self) -> float:
        """Of the minute's tokens, 0 to 1; 0 without a limit."""
        return 1 - self.tokens_left.remaining / self.tokens_left.limit if self.tokens_left else 0.0

    def headers(self) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*`."""
        found: dict[str, str] = {}
        for kind, allowance in (("requests", self.requests_left), ("tokens", self.tokens_left)):
            if allowance is not None:
                found[f"x-ratelimit-limit-{kind}"] = str(allowance.limit)
                found[f"x-ratelimit-remaining-{kind}"] = str(allowance.remaining)
                found[f"x-ratelimit-reset-{kind}"] = f"{allowance.reset_s:.3f}s"
        return found


class RateLimits:
    """Reserve before the work, settle after it. A tenant without limits costs nothing."""

    def __init__(self, store: Store, on_loss: Literal["allow", "deny"]) -> None:
        self._store = store
        self._on_loss = on_loss
        self._owed: dict[str, int] = {}
        self._limits: dict[str, Limits] = {}
        self._settling: asyncio.Task[None] | None = None

    async def reserve(self, tenant: str, limits: Limits, tokens: int) -> Reservation:
        """Raises `RateLimited` with the time to wait, or `LimitsUnavailable`."""
        requests_limit, tokens_limit = limits.requests_per_minute or 0, limits.tokens_per_minute or 0
        if not (requests_limit or tokens_limit):
            return Reservation(tenant, limits)
        if tokens_limit and tokens > tokens_limit:
            raise RateLimited(
                f"The request needs up to {tokens} tokens, more than the {tokens_limit} a minute of tenant {tenant!r}. "
                "Shorten it or lower max_completion_tokens.",
                param="max_completion_tokens",
            )
        try:
            reply = await self._store.script(SCRIPT, [self._key(tenant)], requests_limit, tokens_limit, 1, tokens, 0)
        except StoreAway as error:
            if self._on_loss == "deny":
                raise LimitsUnavailable("The rate limits can't be checked right now.", retry_after_s=1.0) from error
            return Reservation(tenant, limits)
        allowed, requests_left, tokens_left, requests_reset, tokens_reset, wait_ms = reply
        if not allowed:
            raise RateLimited(
                f"Tenant {tenant!r} has used up its {requests_limit or 'unlimited'} requests or "
                f"{tokens_limit or 'unlimited'} tokens a minute.",
                retry_after_s=wait_ms / 1000,
            )
        return Reservation(
            tenant,
            limits,
            tokens if tokens_limit else 0,
            Allowance(requests_limit, requests_left, requests_reset / 1000) if requests_limit else None,
            Allowance(tokens_limit, max(0, tokens_left), tokens_reset / 1000) if tokens_limit else None,
        )

    def settle(self, reservation: Reservation, used: int) -> None:
        """Gives back what was not used, or takes what was used beyond it: soon, and for all requests of a tenant at once.
        Lost when Redis is away: the bucket refills."""
        if not reservation.tokens or used == reservation.tokens:
            return
        tenant = reservation.tenant
        self._owed[tenant] = self._owed.get(tenant, 0) + used - reservation.tokens
        self._limits[tenant] = reservation.limits
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle_soon())

    async def settled(self) -> None:
        """Returns when nothing is owed."""
        if self._settling is not None:
            await self._settling

    async def _settle_soon(self) -> None:
        while self._owed:
            await asyncio.sleep(SETTLE_EVERY_S)
            owed, self._owed = self._owed, {}
            for tenant, tokens in owed.items():
                limits = self._limits[tenant]
                per_minute = (limits.requests_per_minute or 0, limits.tokens_per_minute or 0)
                with contextlib.suppress(StoreAway):
                    await self._store.script(SCRIPT, [self._key(tenant)], *per_minute, 0, tokens, 1)

    def _key(self, tenant: str) -> str:
        return self._store.key("limits", tenant)
