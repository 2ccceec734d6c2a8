"""What all commands share: where they print, and which config they mean when none is given."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from rich.console import Console

PIPE_WIDTH = 200
out = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)  # a program reads tables whole
err = Console(stderr=True)


def config_path(config: Path | None) -> Path:
    """The example deployment's when there is none."""
    if config is not None:
        return config
    return Path(str(files("gearshift.deployments").joinpath("presets/local.yaml")))
