"""Files with one JSON object a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gearshift.platform.errors import ConfigError

T = TypeVar("T")


def read(path: Path, kind: type[T]) -> list[T]:
    """Raises `ConfigError` with the line that is wrong, and for a file without lines."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: not a {kind.__name__} as JSON: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: is empty")
    return rows


def write(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
