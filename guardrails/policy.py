"""A policy of the config, ready to run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gearshift.guardrails.chain import Chain, make_chain
from gearshift.guardrails.verdict import Verdict
from gearshift.platform.config import Policy
from gearshift.platform.request import Message


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    input: Chain
    output: Chain

    def check_messages(self, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], list[Verdict]]:
        """The messages with redactions made, and the verdicts that were not `allow`."""
        checked: list[Message] = []
        verdicts: list[Verdict] = []
        for message in messages:
            verdict = self.input.check(message.content)
            if verdict.action != "allow":
                verdicts.append(verdict)
                message = replace(message, content=verdict.text)
            checked.append(message)
        return tuple(checked), verdicts


def compile_policy(policy: Policy) -> CompiledPolicy:
    return CompiledPolicy(make_chain(policy, "input"), make_chain(policy, "output"))
