"""Routes for operators, on a port of their own: what runs, and the weights of experiments."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from gearshift import __version__
from gearshift.deployments import registry
from gearshift.deployments.control import SnapshotBoard
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config
from gearshift.platform.errors import GearshiftError, LimitsUnavailable, public
from gearshift.platform.request import JsonObject
from gearshift.platform.tenants import require_token
from gearshift.router.arms import Snapshot


class Weights(BaseModel):
    """Body of `PUT /admin/experiments/{name}`; an arm that is left out gets 0."""

    model_config = ConfigDict(extra="forbid")

    arms: dict[str, float]


def create_admin_app(config: Config, store: Store, environ: Mapping[str, str]) -> FastAPI:
    token = environ[config.admin.token_env] if config.admin.token_env else None
    board = SnapshotBoard(store, config)
    started = time.time()

    def guard(authorization: str = Header(default="")) -> None:
        require_token(token, authorization)

    app = FastAPI(title="Gearshift admin", version=__version__, dependencies=[Depends(guard)])

    @app.get("/admin/status")
    async def status() -> JsonObject:
        members, snapshot = await registry.members(store), await board.read()
        return {
            "version": __version__,
            "uptime_s": round(time.time() - started, 1),
            "gateways": [_member(member) for member in members if not member.model],
            "engines": [_member(member) for member in members if member.model],
            "tiers": {name: _tier(config, snapshot, name) for name in config.tiers},
            "epoch": snapshot.epoch,
        }

    @app.get("/admin/experiments")
    async def experiments() -> JsonObject:
        return _snapshot(await board.read())

    @app.put("/admin/experiments/{name}")
    async def set_weights(name: str, weights: Weights) -> JsonObject:
        return _snapshot(await board.set_weights(name, weights.arms))

    @app.exception_handler(GearshiftError)
    async def on_error(_: Request, error: GearshiftError) -> Response:
        shown = public(error)
        return JSONResponse(shown.body(), shown.status)

    @app.exception_handler(StoreAway)
    async def on_store_away(_: Request, __: StoreAway) -> Response:
        away = LimitsUnavailable("Redis is away; the state of the deployment can't be read.")
        return JSONResponse(away.body(), away.status)

    return app


class AdminServer:
    """Serves the admin app from a thread of the process that owns the deployment."""

    def __init__(self, config: Config, redis_url: str) -> None:
        self._config = config
        self._redis_url = redis_url
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(timeout=5)

    async def _serve(self) -> None:
        redis, admin = self._config.redis, self._config.admin
        store = Store(self._redis_url, redis.namespace, redis.timeout_s)
        app = create_admin_app(self._config, store, os.environ)
        self._server = uvicorn.Server(
            uvicorn.Config(app, host=admin.host, port=admin.port, log_config=None, access_log=False, lifespan="off")
        )
        await self._server.serve()
        await store.close()


def _member(member: registry.Member) -> JsonObject:
    shown: JsonObject = {"name": member.name, "pid": member.pid, "rss_mib": round(member.rss_bytes / 2**20)}
    if member.model:
        stats = member.stats
        used, total = stats.kv_blocks_used, stats.kv_blocks_total
        queries, hits = stats.prefix_queries, stats.prefix_hits
        shown |= {
            "model": member.model,
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": round(used / total, 4) if total else 0.0,
            "kv_blocks_used": used,
            "prefix_hit_rate": round(hits / queries, 4) if queries else 0.0,
            "steps": stats.steps,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "preemptions": stats.preemptions,
            "aborted": stats.aborted,
        }
    return shown


def _tier(config: Config, snapshot: Snapshot, name: str) -> JsonObject:
    tier = config.tiers[name]
    if tier.release is not None:
        return {"release": tier.release}
    return {"experiment": tier.experiment, "arms": dict(snapshot.weights[tier.experiment or ""])}


def _snapshot(snapshot: Snapshot) -> dict[str, Any]:
    return {"epoch": snapshot.epoch, "experiments": {name: dict(arms) for name, arms in snapshot.weights.items()}}
