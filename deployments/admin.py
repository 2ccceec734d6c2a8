"""Routes for operators, on a port of their own: what runs, and the weights of experiments."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from gearshift import __version__
from gearshift.deployments import registry
from gearshift.deployments.admin_review import review_routes
from gearshift.deployments.autoscale import load_of
from gearshift.deployments.control import SnapshotBoard
from gearshift.deployments.files import check_files
from gearshift.deployments.marks import marks_of
from gearshift.deployments.plan import instances_of, plan
from gearshift.deployments.replicas import Place
from gearshift.deployments.reviews import Reviews
from gearshift.deployments.revisions import Kind, Revision, Revisions
from gearshift.platform import config_file
from gearshift.platform.cache import exact
from gearshift.platform.cache.exact import ExactCache
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config
from gearshift.platform.errors import ConfigError, GearshiftError, InvalidRequest, NotFound, StoreUnavailable, public
from gearshift.platform.request import JsonObject
from gearshift.platform.tenants import require_token
from gearshift.router.arms import Snapshot

Who = Annotated[str, Header()]
"""Who acts, for the log; it is not checked."""
NODES_TIMEOUT_S = 2.0
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
Action = Literal["pause", "resume", "advance", "abort"]


class Weights(BaseModel):
    """Body of `PUT /admin/experiments/{name}`; an arm that is left out gets 0."""

    model_config = ConfigDict(extra="forbid")

    arms: dict[str, float]
    why: str = ""


class Reason(BaseModel):
    """Body of what is done to an experiment by hand."""

    model_config = ConfigDict(extra="forbid")

    why: str = ""


class NewRevision(BaseModel):
    """Body of `POST /admin/revisions`. config: with every default filled in, as JSON. based_on: the revision that was serving
    when it was planned; 0 takes whatever serves now."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any]
    based_on: int = 0
    why: str = ""


class Back(BaseModel):
    """Body of `POST /admin/rollback`; the revision before the one that serves when it is left out."""

    model_config = ConfigDict(extra="forbid")

    revision: int | None = None
    why: str = ""


class Purge(BaseModel):
    """Body of `POST /admin/cache/purge`: whose answers; what is left out is any."""

    model_config = ConfigDict(extra="forbid")

    tenant: str | None = None
    release: str | None = None


def create_admin_app(
    serving: Callable[[], Config],
    store: Store,
    environ: Mapping[str, str],
    nodes: Callable[[], list[JsonObject]] = list,
) -> FastAPI:
    """`serving`: the config of the present revision. `nodes`: of the cluster; may take long."""
    token_env = serving().admin.token_env
    token = environ[token_env] if token_env else None
    revisions = Revisions(store)
    started = time.time()

    def guard(authorization: str = Header(default="")) -> None:
        require_token(token, authorization)

    app = FastAPI(title="Gearshift admin", version=__version__, dependencies=[Depends(guard)])

    @app.get("/admin/status")
    async def status() -> JsonObject:
        everybody, snapshot = await registry.everybody(store), await SnapshotBoard(store, serving()).read()
        members = [member for member in everybody if not member.stage]
        head = await revisions.head()
        return {
            "revision": head.serving,
            "applying": 0 if head.settled else head.target,
            "version": __version__,
            "uptime_s": round(time.time() - started, 1),
            "problem": head.problem if head.outcome == "undone" else "",
            "nodes": await _nodes(nodes),
            "gateways": [_member(member) for member in members if not member.model],
            "engines": [_member(member) for member in members if registry.is_engine(member)],
            "starting": [_starting(member) for member in everybody if member.stage],
            "models": await _models(serving(), members, store),
            "encoders": [_member(member) for member in members if member.model == registry.ENCODER],
            "evaluators": [_member(member) for member in members if member.model == registry.EVALUATOR],
            "tiers": {name: _tier(serving(), snapshot, name) for name in serving().tiers},
            "epoch": snapshot.epoch,
            "alerts": (await evaluated(store))["alerts"],
        }

    @app.get("/admin/experiments")
    async def experiments() -> JsonObject:
        return _snapshot(serving(), await SnapshotBoard(store, serving()).read())

    @app.get("/admin/experiments/{name}")
    async def experiment(name: str) -> JsonObject:
        """What the evaluator last said of it."""
        found = (await evaluated(store))["experiments"].get(name)
        if found is None:
            raise NotFound(f"There is no experiment {name!r}; there are: {', '.join(serving().experiments) or 'none'}.")
        return dict(found)

    @app.put("/admin/experiments/{name}")
    async def set_weights(name: str, body: Weights, x_gearshift_who: Who = "") -> JsonObject:
        return _snapshot(
            serving(), await SnapshotBoard(store, serving()).set_weights(name, body.arms, x_gearshift_who, body.why)
        )

    @app.post("/admin/experiments/{name}/{action}")
    async def act(name: str, action: Action, body: Reason, x_gearshift_who: Who = "") -> JsonObject:
        who, why = x_gearshift_who, body.why
        if action in ("pause", "resume"):
            return _snapshot(serving(), await SnapshotBoard(store, serving()).pause(name, action == "pause", who, why))
        if action == "advance":
            return _snapshot(serving(), await SnapshotBoard(store, serving()).advance(name, who, why))
        return _snapshot(serving(), await SnapshotBoard(store, serving()).abort(name, who, why))

    @app.get("/admin/changes")
    async def changes() -> JsonObject:
        return {"changes": [msgspec.to_builtins(change) for change in await SnapshotBoard(store, serving()).changes()]}

    @app.get("/admin/releases")
    async def releases() -> JsonObject:
        snapshot, scores = await SnapshotBoard(store, serving()).read(), (await evaluated(store))["releases"]
        return {"releases": [_release(serving(), snapshot, name, scores.get(name, {})) for name in serving().releases]}

    @app.get("/admin/cache")
    async def cache() -> JsonObject:
        return {"answers": await store.count_all(store.key(exact.EXACT, "*"))}

    @app.post("/admin/cache/purge")
    async def purge(body: Purge) -> JsonObject:
        if body.tenant is not None and body.tenant not in serving().tenants:
            raise NotFound(f"There is no tenant {body.tenant!r}; there are: {', '.join(serving().tenants)}.")
        if body.release is not None and not NAME.fullmatch(body.release):  # one that is gone may have left answers
            raise InvalidRequest(f"{body.release!r} is no name of a release.", param="release")
        kept = ExactCache(store, 0.0, 0)
        return {"deleted": await kept.purge(body.tenant or "*", body.release or "*")}

    app.include_router(review_routes(lambda: Reviews(store, serving().review.keep_s)))

    @app.get("/admin/revisions")
    async def history() -> JsonObject:
        found, head = await revisions.all(), await revisions.head()
        return {"head": msgspec.to_builtins(head), "revisions": [_revision(each) for each in found]}

    @app.get("/admin/revisions/{number}")
    async def revision(number: int) -> JsonObject:
        found = await revisions.get(number)
        return _revision(found) | {"config": msgspec.json.decode(found.config)}

    @app.post("/admin/revisions")
    async def apply(body: NewRevision, x_gearshift_who: Who = "") -> JsonObject:
        new = config_file.parse(json.dumps(body.config), "revision")
        return await _begin(new, body.based_on, x_gearshift_who, body.why, "apply", 0)

    @app.post("/admin/rollback")
    async def rollback(body: Back, x_gearshift_who: Who = "") -> JsonObject:
        number = body.revision or before((await revisions.all()), (await revisions.head()).serving)
        return await _begin((await revisions.get(number)).parsed(), 0, x_gearshift_who, body.why, "rollback", number)

    async def _begin(new: Config, based_on: int, who: str, why: str, kind: Kind, of: int) -> JsonObject:
        """Refused at once where that can be told; what the replicas say comes later, in the head's outcome."""
        planned = plan(serving(), new)
        if planned.refused:
            raise ConfigError(
                "A running deployment can't change these; restart it with the new file:\n" + "\n".join(planned.refused)
            )
        if planned.empty:
            raise InvalidRequest("Nothing would change.")
        check_files(new)
        marks_of(new)
        based_on = based_on or (await revisions.head()).serving
        return _revision(await revisions.begin(new, based_on, who, why, kind, of))

    @app.exception_handler(GearshiftError)
    async def on_error(_: Request, error: GearshiftError) -> Response:
        shown = public(error)
        return JSONResponse(shown.body(), shown.status)

    @app.exception_handler(StoreAway)
    async def on_store_away(_: Request, __: StoreAway) -> Response:
        away = StoreUnavailable("Redis is away; the state of the deployment can't be read.")
        return JSONResponse(away.body(), away.status)

    return app


class AdminServer:
    """Serves the admin app from a thread of the process that owns the deployment."""

    def __init__(self, serving: Callable[[], Config], place: Place, nodes: Callable[[], list[JsonObject]]) -> None:
        self._serving = serving
        self._nodes = nodes
        self._place = place
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(timeout=5)

    async def _serve(self) -> None:
        admin, store = self._serving().admin, self._place.store()
        app = create_admin_app(self._serving, store, os.environ, self._nodes)
        self._server = uvicorn.Server(
            uvicorn.Config(app, host=admin.host, port=admin.port, log_config=None, access_log=False, lifespan="off")
        )
        await self._server.serve()
        await store.close()


def _member(member: registry.Member) -> JsonObject:
    shown: JsonObject = {"name": member.name, "pid": member.pid, "rss_mib": round(member.rss_bytes / 2**20)}
    if member.node:
        shown["node"] = member.node
    if member.revision:
        shown["revision"] = member.revision
    if registry.is_engine(member) or not member.model:
        shown["ttft"] = {
            "p50_s": member.ttft.p50,
            "p95_s": member.ttft.p95,
            "p99_s": member.ttft.p99,
            "count": member.ttft.count,
        }
    if registry.is_engine(member):
        stats = member.stats
        used, total = stats.kv_blocks_used, stats.kv_blocks_total
        queries, hits = stats.prefix_queries, stats.prefix_hits
        shown |= {
            "model": member.model.partition("@")[0],
            "instance": member.model,
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": round(used / total, 4) if total else 0.0,
            "kv_blocks_used": used,
            "prefix_hit_rate": round(hits / queries, 4) if queries else 0.0,
            "queued_tokens": stats.queued_tokens,
            "steps": stats.steps,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "preemptions": stats.preemptions,
            "aborted": stats.aborted,
            "ranks": [member.pid, *member.ranks],
        }
    return shown


async def _nodes(nodes: Callable[[], list[JsonObject]]) -> list[JsonObject] | None:
    """None while the head of the cluster does not answer."""
    try:
        async with asyncio.timeout(NODES_TIMEOUT_S):
            return await asyncio.to_thread(nodes)
    except Exception:  # Ray's, of many kinds
        return None


def _starting(member: registry.Member) -> JsonObject:
    return {"name": member.name, "pid": member.pid, "node": member.node, "model": member.model, "stage": member.stage}


async def _models(config: Config, members: Sequence[registry.Member], store: Store) -> JsonObject:
    """Replicas that each model has and shall have, requests that wait for the first, and what its autoscaler did last."""
    told = await registry.scales(store)
    found: JsonObject = {}
    for key, name in instances_of(config).items():
        load, scaling = load_of(key, members), config.models[name].autoscaling
        found[name] = {"instance": key, "replicas": load.replicas, "held": load.held}
        if scaling is not None:
            found[name] |= {"min_replicas": scaling.min_replicas, "max_replicas": scaling.max_replicas}
            found[name]["scaled"] = msgspec.to_builtins(told[key]) if key in told else None
    return found


def _tier(config: Config, snapshot: Snapshot, name: str) -> JsonObject:
    tier = config.tiers[name]
    if tier.release is not None:
        return {"release": tier.release}
    name = tier.experiment or ""
    trial = snapshot.trials[name]
    return {
        "experiment": name,
        "arms": snapshot.weights(config.experiments[name], name),
        "status": trial.status,
        "why": trial.why,
    }


def _snapshot(config: Config, snapshot: Snapshot) -> dict[str, Any]:
    found = {
        name: {
            "arms": snapshot.weights(experiment, name),
            "status": snapshot.trials[name].status,
            "stage": snapshot.trials[name].stage,
            "why": snapshot.trials[name].why,
        }
        for name, experiment in config.experiments.items()
    }
    return {"epoch": snapshot.epoch, "experiments": found}


def _release(config: Config, snapshot: Snapshot, name: str, scores: JsonObject) -> JsonObject:
    """What it pins, where it serves, and what it scored."""
    pinned = config.releases[name]
    served = {}
    for tier in config.tiers:
        each = config.tiers[tier]
        if each.release == name:
            served[tier] = 1.0
        elif each.experiment is not None:
            served[tier] = snapshot.weights(config.experiments[each.experiment], each.experiment).get(name, 0.0)
    return {
        "release": name,
        "model": pinned.model,
        "prompt": f"{pinned.prompt} v{config.prompts[pinned.prompt].version}",
        "policy": f"{pinned.policy} v{config.policies[pinned.policy].version}",
        "serves": {tier: share for tier, share in served.items() if share},
        "cache_generation": snapshot.generations.get(name, 0),
        "scores": scores,
    }


def _revision(revision: Revision) -> JsonObject:
    return {
        "number": revision.number,
        "at": revision.at,
        "who": revision.who,
        "why": revision.why,
        "kind": revision.kind,
        "of": revision.of,
    }


def before(revisions: Sequence[Revision], serving: int) -> int:
    """The revision that a roll back goes to when nobody says: the last one that differs from what serves, and is none of those
    that were rolled back from. Raises `InvalidRequest`."""
    if not serving:
        raise InvalidRequest("Nothing serves yet.")
    here = revisions[serving - 1]
    first = here.of or here.number
    older = [each.number for each in revisions[: first - 1] if each.config != here.config]
    if not older:
        raise InvalidRequest("There is no older revision to go back to.")
    return older[-1]


async def evaluated(store: Store) -> JsonObject:
    """The evaluator's last report; empty before the first."""
    raw = (await store.hash_all(store.key("evaluator"))).get("report")
    found: JsonObject = msgspec.json.decode(raw) if raw else {"experiments": {}, "releases": {}, "alerts": []}
    return found
