"""The watermark of each release: settings from the config, the secret from the environment."""

from __future__ import annotations

import hashlib
import os

from gearshift.platform.config import Config, Release
from gearshift.platform.errors import ConfigError
from gearshift.platform.request import Watermark

LEAST_KEY_CHARS = 16


def mark_of(release: Release) -> Watermark | None:
    """Raises `ConfigError` where the secret is missing."""
    settings = release.watermark
    if settings is None:
        return None
    secret = os.environ.get(settings.key_env, "")
    if len(secret) < LEAST_KEY_CHARS:
        needed = f"is not set in the environment to at least {LEAST_KEY_CHARS} characters"
        raise ConfigError(f"watermark.key_env: {settings.key_env} {needed}")
    digest = hashlib.sha256(f"watermark {secret}".encode()).digest()
    return Watermark(int.from_bytes(digest[:8], "big") >> 1, settings.strength, settings.share)


def marks_of(config: Config) -> dict[str, Watermark | None]:
    """By release. Raises `ConfigError`."""
    found = {}
    for name, release in config.releases.items():
        try:
            found[name] = mark_of(release)
        except ConfigError as error:
            raise ConfigError(f"releases.{name}.{error.message}") from error
    return found
