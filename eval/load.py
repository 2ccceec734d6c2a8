"""A load generator for HTTP APIs: so many clients, each sending its next request when it has its last answer."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import psutil

Body = Callable[[int], bytes]
"""The body of request number n."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one run measured. Latencies in seconds, of whole answers; `events` counts SSE events of all of them."""

    requests: int
    seconds: float
    latencies: tuple[float, ...]
    events: int
    cpu_seconds: float

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def cpu_ms_per_request(self) -> float:
        return self.cpu_seconds / self.requests * 1e3

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.latencies) * 1e3

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles(self.latencies, n=100)[98] * 1e3


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time that the processes have used so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def idle_cpu_ms_per_second(pids: Sequence[int], seconds: float) -> float:
    """What the processes use while nobody asks them anything."""
    cpu = cpu_seconds(pids)
    time.sleep(seconds)
    return (cpu_seconds(pids) - cpu) / seconds * 1e3


async def run(url: str, body: Body, requests: int, clients: int, pids: Sequence[int], key: str = "") -> Load:
    """Sends `requests` requests over `clients` connections; anything but a 200 raises. CPU is that of `pids`."""
    numbers = itertools.count()
    latencies: list[float] = []
    events = 0
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal events
        while (number := next(numbers)) < requests:
            begun = time.perf_counter()
            async with session.post(url, data=body(number), headers=headers) as response:
                answer = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{url} answered {response.status}: {answer[:200]!r}")
            latencies.append(time.perf_counter() - begun)
            events += answer.count(b"data: ")

    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(connector=connector) as session:
        cpu, begun = cpu_seconds(pids), time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        seconds = time.perf_counter() - begun
    return Load(requests, seconds, tuple(latencies), events, cpu_seconds(pids) - cpu)
