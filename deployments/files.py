"""The files that a config names are a part of it."""

from __future__ import annotations

from pathlib import Path

from gearshift.deployments.canaries import questions_of
from gearshift.guardrails.policy import compile_policies
from gearshift.platform.config import Config
from gearshift.router.router import Router


def check_files(config: Config) -> None:
    """Raises `ConfigError` for one that is missing, damaged, or made for something else."""
    Router(config)
    compile_policies(config)
    questions_of(config)
    if config.cache.semantic is not None and config.embedding is not None:
        from gearshift.platform.cache import verifier  # for those who ask for it

        verifier.load(Path(config.cache.semantic.verifier or verifier.SHIPPED), config.embedding.source)
