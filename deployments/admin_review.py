"""Routes of what waits for a human, under `/admin/review`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Header, Query
from pydantic import BaseModel, ConfigDict

from gearshift.deployments.reviews import Reviews, shown
from gearshift.guardrails.review import Status, broken
from gearshift.platform.request import JsonObject

MOST = 1000


class Decision(BaseModel):
    """Body of `POST /admin/review/{ticket}`."""

    model_config = ConfigDict(extra="forbid")

    decision: Literal["approved", "rejected"]
    why: str = ""


def review_routes(reviews: Callable[[], Reviews]) -> APIRouter:
    """reviews: of the present revision."""
    routes = APIRouter(prefix="/admin/review")

    @routes.get("")
    async def latest(status: Status | None = None, most: Annotated[int, Query(ge=1, le=MOST)] = 100) -> JsonObject:
        return {"tickets": [shown(ticket) for ticket in await reviews().latest(most, status)]}

    @routes.get("/log")
    async def log() -> JsonObject:
        """All of it, with the number of the first entry that was tampered with."""
        entries = await reviews().log()
        told = [msgspec.to_builtins(entry) | {"hash": entry.hash} for entry in entries]
        return {"entries": told, "broken_at": broken(entries)}

    @routes.get("/{name}")
    async def ticket(name: str) -> JsonObject:
        return shown(await reviews().get(name))

    @routes.post("/{name}")
    async def decide(name: str, body: Decision, x_gearshift_who: Annotated[str, Header()] = "") -> JsonObject:
        return shown(await reviews().decide(name, body.decision, x_gearshift_who, body.why))

    return routes
