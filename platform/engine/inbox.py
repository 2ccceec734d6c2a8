"""How pieces of an answer wait for the one who asked: a queue for each request, read until the answer ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from gearshift.platform.errors import GearshiftError
from gearshift.platform.request import Delta

Inbox = asyncio.Queue[Delta | GearshiftError]


async def read(inbox: Inbox) -> AsyncGenerator[Delta, None]:
    """Yields the deltas up to the last one; raises the error that ended the answer instead."""
    while True:
        item = await inbox.get()
        if isinstance(item, GearshiftError):
            raise item
        yield item
        if item.finish_reason:
            return
