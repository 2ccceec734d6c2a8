"""Connections to the engines of all revisions that a process works with: those of models that did not change are shared."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from gearshift.deployments import registry
from gearshift.deployments.plan import engine_key
from gearshift.deployments.remote import RemoteEngine
from gearshift.platform.cache.store import Store
from gearshift.platform.config import Config
from gearshift.platform.engine.protocol import Engine
from gearshift.platform.engine.upstream import UpstreamEngine


class EnginePool:
    """Owns the connections."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engines: dict[str, Engine] = {}

    def keys(self, config: Config) -> dict[str, str]:
        """Where each model's engine is in the pool, from now on."""
        keys = {name: engine_key(config, name) for name in config.models}
        for name, key in keys.items():
            upstream = config.models[name].upstream
            if key not in self._engines:
                self._engines[key] = UpstreamEngine(upstream, os.environ) if upstream else RemoteEngine(name)
        return keys

    def engines(self, keys: Mapping[str, str]) -> dict[str, Engine]:
        return {name: self._engines[key] for name, key in keys.items()}

    def away(self, keys: Mapping[str, str]) -> list[str]:
        """Models without a replica that answers."""
        engines = self.engines(keys).items()
        return [name for name, engine in engines if isinstance(engine, RemoteEngine) and not engine.ready]

    async def connect(self, keys: Iterable[str]) -> None:
        """To every replica that is up. Raises `StoreAway`."""
        members = await registry.members(self._store)
        for key in set(keys):
            engine = self._engines[key]
            if isinstance(engine, RemoteEngine):
                await engine.refresh(Path(member.address) for member in members if member.model == key)

    async def keep(self, keys: Iterable[str]) -> None:
        """Lets go of all others."""
        kept = set(keys)
        for key in [key for key in self._engines if key not in kept]:
            await self._engines.pop(key).close()

    async def close(self) -> None:
        await self.keep(())
