"""Only one `gearshift serve` at a time steers a deployment: it holds a key in Redis that ends soon after it does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

import psutil

from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.errors import Conflict

TTL_S = 15.0
RENEW_S = 3.0
LOOK_S = 0.2
TAKE = """
-- KEYS: lease; ARGV: who, milliseconds, whom to take it from. Empty where it is now theirs, else whose it is.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] and holder ~= ARGV[3] then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ''
"""
GIVE_BACK = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class Lease:
    """Taken when made, and kept by a thread until it is given back."""

    def __init__(self, store: Callable[[], Store]) -> None:
        """store: makes one. Raises `Conflict` when another one holds it, `StoreAway`."""
        self._store = store
        self._me = f"{socket.gethostname()} {os.getpid()} {psutil.Process().create_time():.2f}"
        self._ended = threading.Event()
        self.held = True
        asyncio.run(self._take())
        self._thread = threading.Thread(target=lambda: asyncio.run(self._keep()), name="lease", daemon=True)
        self._thread.start()

    def give_back(self) -> None:
        self._ended.set()
        self._thread.join()

    async def _take(self) -> None:
        store, deadline = self._store(), time.monotonic() + TTL_S + RENEW_S
        try:
            while holder := await self._try(store):
                if is_gone(holder):
                    await self._try(store, holder)
                elif time.monotonic() > deadline:
                    host, pid, _ = holder.split()
                    raise Conflict(
                        f"Another `gearshift serve` steers this deployment, process {pid} on {host}; end it first, or set "
                        "another redis.namespace."
                    )
                await asyncio.sleep(LOOK_S)
        finally:
            await store.close()

    async def _try(self, store: Store, instead_of: str = "") -> str:
        """Who holds it, if not we."""
        found: bytes = await store.script(TAKE, [store.key("controller")], self._me, str(int(TTL_S * 1000)), instead_of)
        return found.decode()

    async def _keep(self) -> None:
        """While Redis is away nobody can take it either."""
        store = self._store()
        while not await asyncio.to_thread(self._ended.wait, RENEW_S):
            try:
                self.held = not await self._try(store)
            except StoreAway:
                continue
        with contextlib.suppress(StoreAway):
            await store.script(GIVE_BACK, [store.key("controller")], self._me)
        await store.close()


def is_gone(holder: str) -> bool:
    """Whether it was a process of this machine that has ended."""
    host, pid, created = holder.split()
    if host != socket.gethostname():
        return False
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" != created
    except psutil.NoSuchProcess:
        return True
