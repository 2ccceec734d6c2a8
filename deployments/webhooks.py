"""Tells others what was done to experiments: the log, line by line, in order, at least once, signed."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Mapping

import httpx
import msgspec
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from gearshift.deployments.control import Change, SnapshotBoard
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config, Webhook
from gearshift.platform.telemetry import WEBHOOKS

log = logging.getLogger(__name__)

LOOK_S = 0.5
TIMEOUT_S = 10.0
TRIES = 8
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0


class Webhooks:
    """One task a webhook. Where each is in the log is kept in Redis; a new webhook begins with what comes next."""

    def __init__(
        self, config: Config, store: Store, environ: Mapping[str, str], first_wait_s: float = FIRST_WAIT_S
    ) -> None:
        self._hooks = config.evaluation.webhooks
        self._board = SnapshotBoard(store, config)
        self._store = store
        self._key = store.key("webhooks")
        self._secrets = {hook.url: environ.get(hook.secret_env, "") for hook in self._hooks}
        self._first_wait_s = first_wait_s

    async def run(self) -> None:
        """Until cancelled."""
        async with httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False) as http:
            await asyncio.gather(*(self._serve(hook, http) for hook in self._hooks))

    async def _serve(self, hook: Webhook, http: httpx.AsyncClient) -> None:
        while True:
            try:
                changes = await self._board.changes()
                told = (await self._store.hash_all(self._key)).get(hook.url)
                if told is None:
                    await self._told(hook, len(changes))
                for place in range(int(told or len(changes)), len(changes)):
                    await self._tell(hook, http, changes[place])
                    await self._told(hook, place + 1)
            except StoreAway:
                pass
            await asyncio.sleep(LOOK_S)

    async def _told(self, hook: Webhook, count: int) -> None:
        await self._store.hash_set(self._key, hook.url, str(count).encode())

    async def _tell(self, hook: Webhook, http: httpx.AsyncClient, change: Change) -> None:
        """One that refuses for minutes is given up, so that it can't hold up what comes after."""
        body = msgspec.json.encode({"type": "gearshift.experiment", **msgspec.to_builtins(change)})
        waits = wait_random_exponential(multiplier=self._first_wait_s, max=LONGEST_WAIT_S)
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(TRIES), wait=waits, retry=retry_if_exception_type(httpx.HTTPError)
            ):
                with attempt:
                    headers = {"content-type": "application/json"} | signature(
                        self._secrets[hook.url], body, time.time()
                    )
                    (await http.post(hook.url, content=body, headers=headers)).raise_for_status()
            WEBHOOKS.labels("delivered").inc()
        except RetryError:
            WEBHOOKS.labels("given up").inc()
            log.error("a webhook did not take the change of epoch %d after %d tries", change.epoch, TRIES)


def signature(secret: str, body: bytes, now: float) -> dict[str, str]:
    """`x-gearshift-signature: t=SECONDS,v1=HEX`, where HEX is the HMAC-SHA256 of `SECONDS.BODY`: whoever checks it, and that the
    time is recent, knows that it comes from here and is not an old one sent again."""
    at = str(int(now))
    digest = hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
    return {"x-gearshift-signature": f"t={at},v1={digest}"}
