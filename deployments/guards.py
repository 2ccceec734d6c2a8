"""The guardrails around a request: what is asked goes through them before a model sees it, and what they say of it is noted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from gearshift.deployments.moderations import ModerationBody, messages, moderation, result, verdicts_object
from gearshift.deployments.reviews import Reviews, told
from gearshift.guardrails.chain import Chain
from gearshift.guardrails.policy import Reading, compile_policies
from gearshift.guardrails.review import Held
from gearshift.guardrails.stream import Hold, Kept
from gearshift.guardrails.subject import Entities, Vectors
from gearshift.guardrails.tagger import Entity
from gearshift.guardrails.verdict import Stage, Verdict
from gearshift.platform.cache.store import StoreAway
from gearshift.platform.config import Config, Release
from gearshift.platform.errors import (
    ContentBlocked,
    GuardrailAway,
    InvalidRequest,
    NotFound,
    ReviewRequired,
    StoreUnavailable,
)
from gearshift.platform.openai import Generation
from gearshift.platform.request import Delta, JsonObject, Message
from gearshift.platform.telemetry import Record, VerdictNote
from gearshift.platform.tenants import Caller

Embed = Callable[[str, float | None], Awaitable[tuple[float, ...]]]
"""A text's vector, or an empty one where it does not come in so many seconds, or in `embedding.timeout_s`. The semantic cache
asks the encoder for the same one, which it remembers."""
Name = Callable[[str, float], Awaitable[Sequence[Entity] | None]]
"""What a text names; None where that does not come in so many seconds."""


class Guards:
    """Owns the policies of one revision, ready to run."""

    def __init__(self, config: Config, embed: Embed | None, name: Name | None, reviews: Reviews | None) -> None:
        """embed, name: of the encoder, where there is one. reviews: where what a human has to look at is held; without it, it is
        blocked. Raises `ConfigError`."""
        self._config = config
        self._embed = embed
        self._name = name
        self._reviews = reviews
        self._policies = compile_policies(config, embed is not None)

    def output(self, release: Release) -> Chain:
        return self._policies[release.policy].output

    async def check(self, release: Release, body: Generation, record: Record, keeps: bool) -> tuple[Message, ...]:
        """What was asked, without what is taken out. keeps: whether there is a client to wait for a human; without one, what a
        human has to look at is blocked. Raises `InvalidRequest` for what can't be read, `ContentBlocked`, `GuardrailAway`,
        `ReviewRequired`, `StoreUnavailable`."""
        policy = self._policies[release.policy]
        self._check_readable(release, body)
        found = policy.known(body.turns)
        if found is None:
            reading = policy.reading(body.turns)
            found = reading.check(await self._vectors(reading), await self._entities(reading))
            policy.remember(body.turns, found)
        checked, verdicts = found
        for verdict in verdicts:
            noter(record, "input")(verdict)
        _refuse(verdicts)
        waits = next((verdict.rule for verdict in verdicts if verdict.action == "review"), None)
        if waits is not None:
            await self._review(waits, checked, record, release, keeps)
        return checked

    def holder(self, messages: tuple[Message, ...], record: Record, release: Release, keeps: bool) -> Hold | None:
        """Keeps an answer for a human. keeps: as of `check`."""
        reviews = self._reviews
        if reviews is None or not keeps:
            return None

        async def hold(rule: str, answer: str, last: Delta) -> Kept:
            held = self._held(rule, "output", messages, record, release)
            held = msgspec.structs.replace(held, answer=answer, finish_reason=last.finish_reason, usage=last.usage)
            ticket = await reviews.hold(held)
            return Kept(ticket.id, ticket.status == "approved")

        return hold

    def verdicts(self, record: Record) -> JsonObject:
        """Of a request and its answer, as OpenAI tells it."""
        release = self._config.releases[record.release]
        policy = self._policies[release.policy]
        notes = [(note.stage, note.rule, note.action) for note in record.verdicts]
        return verdicts_object(self._version(release), policy.input.rules, policy.output.rules, notes)

    async def moderate(self, release: Release, body: ModerationBody) -> JsonObject:
        """What the input rules say of texts. Raises `GuardrailAway`."""
        readings = [self._policies[release.policy].reading(messages(text)) for text in body.texts]
        results = [result(each, await self._vectors(each), await self._entities(each)) for each in readings]
        return moderation(self._version(release), results)

    async def picked_up(self, ticket: str, caller: Caller) -> JsonObject:
        """What became of what was held. Raises `NotFound`, `StoreUnavailable`."""
        if self._reviews is None:
            raise NotFound(f"There is no ticket {ticket!r}.")
        try:
            return told(await self._reviews.picked_up(ticket, caller))
        except StoreAway as error:
            raise StoreUnavailable("Tickets can't be read just now; try again.", retry_after_s=1.0) from error

    def _check_readable(self, release: Release, body: Generation) -> None:
        """What guardrails can't read they can't pass."""
        name, policy = release.policy, self._policies[release.policy]
        if body.token_ids is not None and policy.input.reads:
            raise InvalidRequest(
                f"The policy {name!r} reads what is asked; send the prompt as text, or ask a release whose policy has no "
                "input rules.",
                param="prompt",
            )
        if body.logprobs_wanted is not None and policy.output.links:
            raise InvalidRequest(
                f"The policy {name!r} reads answers, and log-probabilities would tell what it takes out of them; ask a "
                "release whose policy has no output rules.",
                param="logprobs",
            )

    async def _vectors(self, reading: Reading) -> Vectors | None:
        """None where no encoder runs."""
        if self._embed is None:
            return None
        texts = reading.doubtful()
        found = await asyncio.gather(*(self._embed(text, self._timeout_s) for text in texts))
        return {text: vector or None for text, vector in zip(texts, found, strict=True)}

    async def _entities(self, reading: Reading) -> Entities:
        texts = reading.to_name()
        if not texts or self._name is None or self._timeout_s is None:
            return {}
        found = await asyncio.gather(*(self._name(text, self._timeout_s) for text in texts))
        return dict(zip(texts, found, strict=True))

    @property
    def _timeout_s(self) -> float | None:
        return self._config.embedding.guard_timeout_s if self._config.embedding is not None else None

    async def _review(
        self, rule: str, messages: tuple[Message, ...], record: Record, release: Release, keeps: bool
    ) -> None:
        """Returns when a human has agreed. Raises `ReviewRequired`, `ContentBlocked`, `StoreUnavailable`."""
        if self._reviews is None or not keeps:
            raise ContentBlocked(f"The request was refused by the rule {rule!r}.", param="messages")
        ticket = await self._reviews.hold(self._held(rule, "input", messages, record, release))
        record.ticket = ticket.id
        if ticket.status == "pending":
            raise ReviewRequired(
                f"The rule {rule!r} wants a human to look at this first: ticket {ticket.id}. Once it is approved "
                f"(GET /v1/reviews/{ticket.id}), send the same request again."
            )
        if ticket.status == "rejected":
            raise ContentBlocked(f"The request was refused by a reviewer: ticket {ticket.id}.", param="messages")

    def _held(self, rule: str, stage: Stage, messages: tuple[Message, ...], record: Record, release: Release) -> Held:
        return Held(
            tenant=record.tenant,
            release=record.release,
            policy=self._version(release),
            rule=rule,
            stage=stage,
            messages=messages,
        )

    def _version(self, release: Release) -> str:
        return f"{release.policy} v{self._config.policies[release.policy].version}"


def _refuse(verdicts: Sequence[Verdict]) -> None:
    """Raises `ContentBlocked`, or `GuardrailAway` where only rules that could not run are against it."""
    deciding = [verdict.decided_by for verdict in verdicts if verdict.action == "block"]
    blocked = min((each for each in deciding if each), key=lambda finding: finding.failed, default=None)
    if blocked is not None and blocked.failed:
        raise GuardrailAway(f"The rule {blocked.rule!r} could not run, and nothing may pass without it; try again.")
    if blocked is not None:
        raise ContentBlocked(f"The request was refused by the rule {blocked.rule!r}.", param="messages")


def noter(record: Record, stage: Stage) -> Callable[[Verdict], None]:
    def note(verdict: Verdict) -> None:
        record.verdicts += [VerdictNote(stage, finding.told, finding.rule) for finding in verdict.findings]

    return note
