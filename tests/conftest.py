"""What every room's tests may use: a real Redis, and a namespace of one's own in it."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gearshift.platform.cache.embedded import EmbeddedRedis
from gearshift.platform.cache.store import Store


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


SERVERS = {"embedded": None} | ({"redis-server": found} if (found := shutil.which("redis-server")) else {})
"""Debian's as well, where it is installed."""


@pytest.fixture(scope="session", params=SERVERS)
def redis_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    with tempfile.TemporaryDirectory(prefix="gearshift-test-") as folder:
        server = EmbeddedRedis(Path(folder), SERVERS[request.param])
        yield server
        server.close()


@pytest.fixture
async def store(redis_server: EmbeddedRedis, anyio_backend: str) -> AsyncIterator[Store]:
    store = Store(redis_server.url, f"test-{uuid.uuid4().hex}", timeout_s=2.0)
    yield store
    await store.close()
