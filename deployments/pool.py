"""Connections to the engines of all revisions that a process works with: those of models that did not change are shared."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from gearshift.deployments import registry
from gearshift.deployments.hold import Hold
from gearshift.deployments.plan import engine_key
from gearshift.deployments.remote import RemoteEngine
from gearshift.platform.cache.store import Store
from gearshift.platform.config import Autoscaling, Config, Model
from gearshift.platform.engine.protocol import Engine
from gearshift.platform.engine.upstream import UpstreamEngine


class EnginePool:
    """Owns the connections."""

    def __init__(self, store: Store, node: str, secret: str, holds: bool = False) -> None:
        """node: address of the one that this process is on. holds: whether requests wait for models that may
        be without a replica."""
        self._store = store
        self._node = node
        self._secret = secret
        self._holds = holds
        self._engines: dict[str, Engine] = {}

    def keys(self, config: Config) -> dict[str, str]:
        """Where each model's engine is in the pool, from now on."""
        keys = {name: engine_key(config, name) for name in config.models}
        for name, key in keys.items():
            known, model = self._engines.get(key), config.models[name]
            if known is None:
                self._engines[key] = self._engine(name, model)
            elif isinstance(known, RemoteEngine) and model.autoscaling is not None:
                known.hold = self._hold(name, model.autoscaling, known.hold)
        return keys

    def _engine(self, name: str, model: Model) -> Engine:
        if model.upstream is not None:
            return UpstreamEngine(model.upstream, os.environ)
        hold = self._hold(name, model.autoscaling) if model.autoscaling is not None else None
        return RemoteEngine(name, hold=hold, secret=self._secret)

    def _hold(self, name: str, settings: Autoscaling, known: Hold | None = None) -> Hold | None:
        """One in which requests wait already stays."""
        if known is not None:
            known.settings = settings
        elif self._holds and not settings.min_replicas:
            return Hold(name, settings)
        return known

    def engines(self, keys: Mapping[str, str]) -> dict[str, Engine]:
        return {name: self._engines[key] for name, key in keys.items()}

    def away(self, keys: Mapping[str, str]) -> list[str]:
        """Models without a replica that answers, and whose requests do not wait for one."""
        engines = self.engines(keys).items()
        return [
            name
            for name, engine in engines
            if isinstance(engine, RemoteEngine) and not engine.ready and not engine.stage
        ]

    def held(self) -> dict[str, int]:
        """Requests that wait for the first replica, by instance."""
        return {
            key: engine.held
            for key, engine in self._engines.items()
            if isinstance(engine, RemoteEngine) and engine.held
        }

    async def connect(self, keys: Iterable[str]) -> None:
        """To every replica that is up. Raises `StoreAway`."""
        everybody = await registry.everybody(self._store)
        for key in set(keys):
            engine = self._engines[key]
            if isinstance(engine, RemoteEngine):
                mine = [member for member in everybody if member.model == key]
                addresses = [member.reached_from(self._node) for member in mine if not member.stage]
                await engine.refresh(addresses, next((member.stage for member in mine if member.stage), ""))

    async def keep(self, keys: Iterable[str]) -> None:
        """Lets go of all others."""
        kept = set(keys)
        for key in [key for key in self._engines if key not in kept]:
            await self._engines.pop(key).close()

    async def close(self) -> None:
        await self.keep(())
