"""The life of a request: one straight line. Each step is one line and one name; the order is the order of the table in
ARCHITECTURE.md. Closing the generator at any step aborts everything below it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial

import msgspec

from gearshift.deployments.call import Call, Candidate, Ticket, cost, estimate_prompt, estimate_tokens, query_of
from gearshift.deployments.cascade import Again, GivenUp, second_sample, verified
from gearshift.deployments.choices import of_choice, several
from gearshift.deployments.guards import Embed, Guards, Name, noter
from gearshift.deployments.identity import fingerprint, question
from gearshift.deployments.marks import marks_of
from gearshift.deployments.moderations import ModerationBody
from gearshift.deployments.reviews import Reviews
from gearshift.deployments.routing import Routing
from gearshift.guardrails import stream
from gearshift.platform import telemetry
from gearshift.platform.cache import exact
from gearshift.platform.cache.ahead import Early
from gearshift.platform.cache.exact import Answer, Question
from gearshift.platform.cache.flight import Flight, Flights, Part
from gearshift.platform.cache.limits import RateLimits
from gearshift.platform.config import AUTO, Config, Release
from gearshift.platform.engine.protocol import Engine, Starting
from gearshift.platform.errors import (
    EngineUnavailable,
    GearshiftError,
    ModelNotFound,
    Overloaded,
    ShuttingDown,
    UpstreamError,
)
from gearshift.platform.prompts.assemble import assemble
from gearshift.platform.request import Delta, JsonObject, Message, Request, SamplingParams, Usage
from gearshift.platform.telemetry import AttemptNote, Record
from gearshift.platform.tenants import Caller, Tenants
from gearshift.router.answers import Attempt, agreement
from gearshift.router.arms import Served, Snapshot, in_shadow, release_of
from gearshift.router.features import Query
from gearshift.router.router import Judgement


class Pipeline:
    """Owns the request. Everything it needs was given to it: it opens nothing and imports no framework."""

    def __init__(
        self,
        config: Config,
        engines: Mapping[str, Engine],
        revisions: Mapping[str, str],
        limits: RateLimits,
        flights: Flights,
        snapshot: Callable[[], Snapshot],
        embed: Embed | None = None,
        name: Name | None = None,
        reviews: Reviews | None = None,
    ) -> None:
        """embed: for a router and guardrails that look at vectors; without it, they do without. name: for guardrails. reviews:
        as of `Guards`."""
        self._config = config
        self._embed = embed
        self._engines = engines
        self._starting = {name: engine for name, engine in engines.items() if isinstance(engine, Starting)}
        self._limits = limits
        self._flights = flights
        self._snapshot = snapshot
        self._tenants = Tenants(config.tenants)
        self._routing = Routing(config, engines, snapshot)
        self.guards = Guards(config, embed, name, reviews)
        self.fingerprints = {name: fingerprint(config, name, revisions) for name in config.releases}
        self._marks = marks_of(config)
        self.inflight = 0
        self.hidden = 0
        """Requests beside those of clients, such as to arms in the shadow."""
        self.draining = False

    async def run(self, call: Call, ticket: Ticket) -> AsyncGenerator[Delta, None]:
        """Steps 2 to 8 and 10. The first Delta comes when the answer has begun; errors before it have a status."""
        record = ticket.record
        with self._seat():
            with record.step("admit"):
                caller = self._tenants.identify(call.authorization)
                record.tenant = caller.tenant
                self._require(caller, call.body.model)
                tokens = estimate_tokens(call.body, self._config)
                ticket.early = self._flights.ahead.begin(call.came) if call.use == "any" else None
                reservation = ticket.reservation = await self._limits.reserve(caller.tenant, caller.limits, tokens)
            try:
                vector: tuple[float, ...] = ()
                if self._embed is not None and self._routing.needs_embedding(call):
                    with record.step("embed"):
                        vector = await self._embed(query_of(call.body).text, None)
                with record.step("route"):
                    candidates = self._routing.candidates(call, caller, reservation, record, vector)
                ticket.heard.trace = call.trace.get("traceparent", "")
                if ticket.heard.wanted:
                    ticket.heard.question = query_of(call.body).text
                async with aclosing(self._first_that_answers(call, candidates, ticket)) as deltas:
                    async for delta in deltas:
                        ticket.heard.hear(delta)
                        yield delta
            finally:
                self._limits.settle(reservation, _used(record))

    async def _first_that_answers(
        self, call: Call, candidates: list[Candidate], ticket: Ticket
    ) -> AsyncGenerator[Delta, None]:
        """Falls back to the next candidate until one has begun; never after that. An answer that is given up has not."""
        record = ticket.record
        for candidate, following in zip(candidates, [*candidates[1:], None], strict=True):
            started = False
            try:
                async with aclosing(self.answer(call, candidate, record, ticket.early)) as deltas:
                    async for delta in deltas:
                        started = True
                        yield delta
                return
            except GivenUp as given_up:
                self._give_up(given_up, call, candidate.served, record)
            except (EngineUnavailable, Overloaded, UpstreamError):
                if started or following is None:
                    raise
                ticket.heard.failed.append(candidate.served)
                record.fallbacks.append((candidate.served.tier, following.served.tier))

    def _give_up(self, given_up: GivenUp, call: Call, served: Served, record: Record) -> None:
        """Its cost is counted; one that was cut off did not tell how long its prompt was."""
        judgement, usage = given_up.judgement, given_up.usage
        usage = Usage(usage.prompt_tokens or estimate_prompt(call.body), usage.completion_tokens)
        price = self._config.tiers[served.tier].price
        note = (served.tier, judgement.reason, judgement.confidence, usage.prompt_tokens, usage.completion_tokens)
        record.attempts.append(AttemptNote(*note, cost(usage, price)))
        record.route_reason = f"{record.route_reason} {judgement.reason}"

    async def answer(
        self, call: Call, candidate: Candidate, record: Record, early: Early | None = None
    ) -> AsyncGenerator[Delta, None]:
        """One release's answer: from the cache, or from its engine through the guardrails."""
        served, verify = candidate.served, candidate.verify
        release = self._config.releases[served.release]
        record.tier, record.release, record.exposure = served.tier, served.release, served.exposure
        sampling = record.sampling = replace(
            call.body.sampling(release.sampling),
            watermark=self._marks[served.release],
            banned=tuple(self._config.policies[release.policy].banned),
        )
        with record.step("guard_input"):
            messages = await self.guards.check(release, call.body, record, keeps=call.use != "never")
        if not call.body.raw:  # what is only continued has no turns, and no place for the release's prompt
            with record.step("assemble"):
                prompt = self._config.prompts[release.prompt]
                record.prompt = release.prompt, prompt.version
                messages = assemble(prompt, messages)
        asked = self._question(call, served.release, messages, sampling, verify is not None, record)
        generate = partial(self._generate, call, release, messages, sampling, verify, record)
        found = await self._look_up(asked, call, record, early)
        if isinstance(found, Answer):  # it passed the output guardrails of this very policy before it was stored
            deltas = found.deltas() if call.body.stream else [found.whole()]
            self._finish(deltas[-1], served, record)
            for delta in deltas:
                yield delta
            return
        coming = generate() if found is not None or asked is None else self._shared(asked, generate, record)
        with self._flights.led(found):
            async with aclosing(coming):
                async for delta in coming:
                    if found is not None:
                        found.add(delta)
                    if delta.finish_reason:
                        self._finish(delta, served, record)
                    yield delta

    async def _look_up(
        self, asked: Question | None, call: Call, record: Record, early: Early | None
    ) -> Answer | Flight | None:
        """The answer, or a flight to be led; None where there is nothing to look up, or somebody else is at it."""
        if asked is None:
            record.cache = "bypass"
            return None
        anew, begun = call.use == "refresh" and self._config.cache.bypass, time.time_ns()
        literally = call.body.cache is not None and not call.body.cache.semantic
        part, found = ("refresh", Flight(asked)) if anew else await self._flights.find(asked, literally, early)
        if part == "hit" and call.came:
            self._flights.ahead.learn(call.came, asked)
        if found is not None:
            record.looked_up(begun, part)
        return found

    def _shared(
        self, asked: Question, generate: Callable[[], AsyncGenerator[Delta, None]], record: Record
    ) -> AsyncGenerator[Delta, None]:
        begun = time.time_ns()

        def told(part: Part) -> None:
            record.looked_up(begun, part)

        return self._flights.follow(asked, generate, told)

    def _generate(
        self,
        call: Call,
        release: Release,
        messages: tuple[Message, ...],
        sampling: SamplingParams,
        verify: Query | None,
        record: Record,
    ) -> AsyncGenerator[Delta, None]:
        """What the engine writes and the guardrails let through, of as many answers as are asked for."""
        chain, note = self.guards.output(release), noter(record, "output")
        hold = self.guards.holder(messages, record, release, keeps=call.use != "never")
        salt, trace = call.body.cache_salt or "", dict(call.trace)

        def ask(choice: int, wished: SamplingParams) -> AsyncGenerator[Delta, None]:
            name = f"{call.id}-{choice}" if choice else call.id
            turns, prompt = (messages, None) if not call.body.raw else ((), call.body.token_ids or messages[0].content)
            request = Request(
                id=name,
                messages=turns,
                sampling=wished,
                tenant=record.tenant,
                service=call.body.service,
                cache_salt=salt,
                trace=trace,
                prompt=prompt,
                session=call.body.prompt_cache_key or "",
            )
            return self._engines[release.model].generate(request)

        if verify is not None:
            asked = _timed(ask(0, replace(sampling, certainty=True)), record)
            judged = self._verified(call, verify, asked, second_sample(ask, sampling), record)
            return stream.watch(judged, chain, note, hold)
        if call.body.choices == 1:
            return stream.watch(_timed(ask(0, sampling), record), chain, note, hold)

        def begin(choice: int) -> AsyncGenerator[Delta, None]:
            return stream.watch(ask(choice, of_choice(sampling, choice)), chain, note, hold)

        begins = [partial(begin, choice) for choice in range(call.body.choices)]
        return _timed(several(begins), record)

    def _verified(
        self, call: Call, query: Query, deltas: AsyncGenerator[Delta, None], again: Again, record: Record
    ) -> AsyncGenerator[Delta, None]:
        """The answer, once it is judged good enough."""
        cascade = self._config.router.cascade
        assert cascade is not None

        async def judge(attempt: Attempt) -> Judgement:
            if cascade.second_sample:
                attempt = replace(attempt, agreement=agreement(attempt.text, await again(cascade.window_tokens)))
            judgement = self._routing.judge(query, attempt, record.tenant)
            if judgement.accepted:
                record.accepted = True
                record.route_reason = f"{record.route_reason} {judgement.reason}"
            return judgement

        return verified(deltas, judge, cascade.window_tokens if call.body.stream else None)

    def stage(self, release: str | None = None) -> str:
        """What is waited for before the model of a release, or any model, answers; empty when it does."""
        wanted = self.model_of(release) if release else None
        return next((each.stage for name, each in self._starting.items() if wanted in (None, name) and each.stage), "")

    def model_of(self, release: str) -> str:
        return self._config.releases[release].model

    @property
    def in_use(self) -> bool:
        return bool(self.inflight or self.hidden)

    def in_shadow(self, record: Record) -> list[Candidate]:
        """Arms that a request which was answered is also sent to, because they have no traffic."""
        seen = record.exposure
        if seen is None or record.status != 200 or record.replayed or record.fallbacks:
            return []
        snapshot = self._snapshot()
        if snapshot.trials[seen.experiment].period != seen.period:  # the weights have moved since
            return []
        arms = in_shadow(self._config, snapshot, seen.experiment, record.request_id)
        exposures = [msgspec.structs.replace(seen, arm=arm) for arm in arms]
        return [Candidate(Served(record.tier, release_of(each.arm), each)) for each in exposures]

    @contextmanager
    def _seat(self) -> Iterator[None]:
        """A bounded number of requests at a time; the next one is told to come again."""
        if self.draining:
            raise ShuttingDown("This gateway is shutting down.", retry_after_s=1.0)
        if self.inflight >= self._config.gateway.max_inflight:
            raise Overloaded("The gateway is full; try again later.", retry_after_s=1.0)
        self.inflight += 1
        telemetry.INFLIGHT.inc()
        try:
            yield
        finally:
            self.inflight -= 1
            telemetry.INFLIGHT.dec()

    def _require(self, caller: Caller, model: str) -> None:
        if model != AUTO and model not in self._config.tiers and model not in self._config.releases:
            known = ", ".join(name for name in self.models() if caller.may_ask(name))
            raise ModelNotFound(f"There is no model {model!r}; there are: {known}.", param="model")
        caller.require(model)

    def _question(
        self,
        call: Call,
        release: str,
        messages: tuple[Message, ...],
        sampling: SamplingParams,
        verify: bool,
        record: Record,
    ) -> Question | None:
        """None when this request has nothing to do with the cache."""
        config, wished = self._config.cache, call.body.cache
        mode = self._config.releases[release].cache or config.mode
        if wished is not None and wished.mode is not None and (config.bypass or wished.mode == "all"):
            mode = wished.mode
        refused = call.use == "never" or (call.use == "none" and config.bypass)
        refused = refused or call.body.tells_verdicts  # which are those of this very answer
        if config.mode == "off" or refused or call.body.choices > 1 or not exact.cacheable(mode, sampling):
            return None
        judge = self._routing.judge_id if verify else ""
        generation = self._snapshot().generations.get(release, 0)
        return question(
            record.tenant, release, self.fingerprints[release], call.body, messages, sampling, judge, generation
        )

    def _finish(self, delta: Delta, served: Served, record: Record) -> None:
        record.usage, record.finish_reason = delta.usage, delta.finish_reason or ""
        record.ticket = delta.ticket or record.ticket
        if delta.usage is not None and served.tier:
            dollars = cost(delta.usage, self._config.tiers[served.tier].price)
            record.cost_dollars, record.saved_dollars = (0.0, dollars) if record.replayed else (dollars, 0.0)

    def models(self) -> list[str]:
        """Everything a client may ask for."""
        return [AUTO, *self._config.tiers, *self._config.releases]

    async def moderate(self, authorization: str, body: ModerationBody) -> JsonObject:
        """What the policy behind a tier or release says of texts. Counts as a request. Raises as `admit`, and `ModelNotFound`,
        `GuardrailAway`."""
        caller = await self.admit(authorization)
        asked = next(iter(self._config.tiers)) if body.model is None else body.model
        self._require(caller, asked)
        release = asked if asked in self._config.releases else self._release_behind(asked)
        return await self.guards.moderate(self._config.releases[release], body)

    def _release_behind(self, tier: str) -> str:
        """Of an experiment, the baseline; `auto` is the first tier."""
        served = self._config.tiers[next(iter(self._config.tiers)) if tier == AUTO else tier]
        return served.release or next(iter(self._config.experiments[served.experiment or ""].arms))

    async def admit(self, authorization: str) -> Caller:
        """Who asks for something other than an answer; it counts as a request. Raises `InvalidApiKey`, `RateLimited`."""
        caller = self._tenants.identify(authorization)
        self._limits.settle(await self._limits.reserve(caller.tenant, caller.limits, 0), 0)
        return caller

    def models_for(self, authorization: str) -> list[str]:
        caller = self._tenants.identify(authorization)
        return [name for name in self.models() if caller.may_ask(name)]

    async def review(self, authorization: str, ticket: str) -> JsonObject:
        """What became of one. Counts as a request. Raises as `admit`, `NotFound`, `StoreUnavailable`."""
        caller = await self.admit(authorization)
        return await self.guards.picked_up(ticket, caller)

    async def settled(self) -> None:
        """Returns when what was left for later has been done."""
        await self._flights.settled()
        await self._limits.settled()


async def _timed(deltas: AsyncGenerator[Delta, None], record: Record) -> AsyncGenerator[Delta, None]:
    """Adds the time that was spent waiting for the engine to the record."""
    with record.step("generate"):
        async with aclosing(deltas):
            while True:
                asked = time.time_ns()
                try:
                    delta = await anext(deltas)
                except StopAsyncIteration:
                    return
                finally:
                    record.engine_ns += time.time_ns() - asked
                record.engine_deltas += 1
                yield delta


def _used(record: Record) -> int:
    """Tokens that count against the limits: none for an answer from the cache, what came out of one that broke off."""
    given_up = sum(note.prompt_tokens + note.completion_tokens for note in record.attempts)
    if record.replayed:
        return given_up
    return given_up + (record.usage.total_tokens if record.usage else record.engine_deltas)


def without_text(error: BaseException) -> str:
    """A name for metrics and traces; never the text, which may quote the request."""
    return error.code if isinstance(error, GearshiftError) else type(error).__name__
