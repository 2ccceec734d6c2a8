"""The files that a config names are a part of it."""

from __future__ import annotations

from gearshift.deployments.canaries import questions_of
from gearshift.platform.config import Config
from gearshift.router.router import Router


def check_files(config: Config) -> None:
    """Raises `ConfigError` for one that is missing, damaged, or made for something else."""
    Router(config)
    questions_of(config)
