"""The scheduler with a model that costs nothing: what it costs itself, and how it shares."""

from __future__ import annotations

import random
import time

from gearshift.platform.engine.blocks import BlockPool
from gearshift.platform.engine.core import EngineCore
from gearshift.platform.engine.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT, FairQueue
from gearshift.platform.engine.scheduler import Scheduler
from gearshift.platform.engine.sequence import Sampled, Sequence, Step
from gearshift.platform.request import SamplingParams

BLOCK = 16


class NullModel:
    def run(self, step: Step) -> list[Sampled]:
        return [Sampled(1)] * sum(chunk.samples for chunk in step)

    def close(self) -> None:
        """There is nothing to let go of."""


def sequence_steps_per_second(running: int, tokens: int = 512) -> float:
    """Sequences times steps for a CPU-second, all of them running, from four tenants."""
    core = EngineCore(Scheduler(BlockPool(running * (tokens + 64) // BLOCK + 1, BLOCK), running, 512), NullModel())
    for number in range(running):
        prompt = [number] * 64
        core.add(Sequence(str(number), prompt, SamplingParams(), tokens, tenant=f"tenant {number % 4}"))
    begun, computed = time.process_time(), 0
    while core.has_work:
        computed += len(core.step())
    return computed / (time.process_time() - begun)


class RequestRoundRobin(FairQueue):
    """Turns by request, as most servers take them: what the token counter is compared with."""

    def charge(self, tenant: str, inputs: int = 0, outputs: int = 0) -> None:
        if inputs:
            self.served[tenant] = self.served.get(tenant, 0.0) + 1


def spread_between_tenants(pool_tokens: int, longest: int, seed: int, by_tokens: bool, steps: int = 4000) -> float:
    """The most that two tenants' weighted served tokens differ while both are backlogged: one sends ten times as many
    requests, the other longer ones."""
    rng = random.Random(seed)
    scheduler = Scheduler(BlockPool(pool_tokens // BLOCK, BLOCK), 16, 256)
    if not by_tokens:
        scheduler.queues["interactive"] = RequestRoundRobin()
    core = EngineCore(scheduler, NullModel())
    served = {"many": 0.0, "few": 0.0}
    backlog = {"many": 100, "few": 10}
    waiting = {"many": 0, "few": 0}
    prompts = {"many": (8, longest // 8), "few": (longest // 2, longest)}
    largest, number = 0.0, 0
    for _ in range(steps):
        for tenant, wanted in backlog.items():
            while waiting[tenant] < wanted:
                number += 1
                length = rng.randint(*prompts[tenant])
                ids = [rng.randrange(1 << 30) for _ in range(length)]
                core.add(Sequence(str(number), ids, SamplingParams(), rng.randint(8, 64), tenant=tenant))
                waiting[tenant] += 1
        step = scheduler.schedule()
        for sequence, start, end in step:
            inputs = max(0, min(end, len(sequence.prompt_ids)) - start)
            served[sequence.tenant] += INPUT_WEIGHT * inputs
            waiting[sequence.tenant] -= start == 0
        for token in scheduler.update(step, NullModel().run(step)):
            served[token.sequence.tenant] += OUTPUT_WEIGHT
        largest = max(largest, abs(served["many"] - served["few"]))
    return largest
