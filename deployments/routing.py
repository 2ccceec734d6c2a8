"""Where a request goes: what the client asked for, what the router makes of it, and which arm of an experiment serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from gearshift.deployments.call import Call, Candidate, estimate_prompt, query_of
from gearshift.platform import telemetry
from gearshift.platform.cache.limits import Reservation
from gearshift.platform.config import AUTO, Config
from gearshift.platform.engine.protocol import Engine
from gearshift.platform.errors import InvalidRequest, PermissionDenied
from gearshift.platform.telemetry import Record
from gearshift.platform.tenants import Caller
from gearshift.router.answers import Attempt
from gearshift.router.arms import Served, Snapshot, Units, serve, threshold, tier_of_release
from gearshift.router.features import Query
from gearshift.router.policy import Asked, Route
from gearshift.router.router import Judgement, Router

log = logging.getLogger(__name__)


class Routing:
    """The router of one revision, with the loads that it looks at."""

    def __init__(self, config: Config, engines: Mapping[str, Engine], snapshot: Callable[[], Snapshot]) -> None:
        """Raises `ConfigError` for files of the router that are missing or made for something else."""
        self._config = config
        self._engines = engines
        self._snapshot = snapshot
        self._router = Router(config)
        self.drift = self._router.drift()

    def needs_embedding(self, call: Call) -> bool:
        """Whether the vector of what is asked says something about where the request goes."""
        return call.body.model == AUTO and self._router.needs_embedding

    def candidates(
        self,
        call: Call,
        caller: Caller,
        reservation: Reservation,
        record: Record,
        embedding: tuple[float, ...] = (),
    ) -> list[Candidate]:
        """Where the request goes first, and where it may fall back to: only the router's choice may be replaced. embedding: of
        what is asked, empty where there is none."""
        snapshot, config, asked = self._snapshot(), self._config, call.body.model
        record.asked, record.epoch = asked, snapshot.epoch
        units = Units(call.id, call.body.unit or "", call.body.prompt_cache_key or "")
        if asked in config.releases:
            record.route_reason = "release"
            return [Candidate(Served(tier_of_release(config, asked), asked))]
        query = replace(query_of(call.body), embedding=embedding)
        is_tier = asked in config.tiers
        chosen = Route(asked, "tier") if is_tier else self._choose(call, caller, query, units, reservation, record)
        record.route_reason, record.score = chosen.reason, chosen.score
        self._watch_drift(caller.tenant, chosen.score)
        candidates = [Candidate(serve(config, snapshot, tier, units)) for tier in (chosen.tier, *chosen.others)]
        if self._router.verifies(chosen) and call.body.choices == 1 and not call.body.raw:
            # what is given up goes on to the others, and back to the first unjudged when none of them can answer
            return [replace(candidates[0], verify=query), *candidates[1:], candidates[0]]
        return candidates

    def _watch_drift(self, tenant: str, score: float | None) -> None:
        if self.drift is None or score is None:
            return
        index = self.drift.scored(tenant, score)
        if index is not None:
            telemetry.ROUTER_DRIFT.labels(tenant).set(index)
            for alert in self.drift.alerts():
                log.warning("router: %s; calibrate anew", alert)

    def judge(self, query: Query, attempt: Attempt, tenant: str) -> Judgement:
        """Of a cheap tier's answer."""
        judgement = self._router.judge(query, attempt)
        if self.drift is not None:
            self.drift.judged(tenant, not judgement.accepted)
        return judgement

    @property
    def judge_id(self) -> str:
        return self._router.judge_id

    def _choose(
        self, call: Call, caller: Caller, query: Query, units: Units, reservation: Reservation, record: Record
    ) -> Route:
        if call.tier and call.tier not in self._config.tiers:
            known = ", ".join(self._config.tiers)
            raise InvalidRequest(f"x-gearshift-tier: there is no tier {call.tier!r}; there are: {known}.")
        tenant = self._config.tenants[caller.tenant]
        if call.tier and tenant.tiers is not None and call.tier not in tenant.tiers:
            allowed = ", ".join(tenant.tiers)
            raise PermissionDenied(
                f"x-gearshift-tier: tenant {caller.tenant!r} may not use {call.tier!r}; it may use: {allowed}."
            )
        wished = call.body.wished_tokens or 0
        asked = Asked(
            prompt_tokens=estimate_prompt(call.body),
            wished_tokens=wished,
            forced=call.tier,
            pinned=tenant.tier or "",
            allowed=frozenset(tenant.tiers) if tenant.tiers else None,
        )
        load = max(self._queue_share(), reservation.used_share)
        base, exposure = threshold(self._config, self._snapshot(), units)
        record.threshold, record.scorer = self._router.threshold_at(load, base), self._router.scorer_id
        record.query = query.text if self._config.telemetry.record_queries else ""
        chosen = self._router.route(query, asked, load, base)
        record.routed_by = exposure if chosen.score is not None else None
        return chosen

    def _queue_share(self) -> float:
        """How full the queues of the most expensive tier are, as far as this gateway was told."""
        models = {self._config.releases[r].model for r in self._config.releases_of(self._router.tiers[-1].name)}
        room = sum(
            self._config.models[name].max_queued_requests * self._config.models[name].replicas for name in models
        )
        return sum(self._engines[name].stats().waiting for name in models) / room if room else 0.0
