"""Who computes what in the next step. Plain Python, no tensors: a decision is a value, and a test needs no model.

There is no prefill phase and no decode phase. Every sequence has `num_computed` tokens in the cache and `num_tokens`
known; each step hands out a budget of tokens until the first catches up with the second. Joining and leaving between
steps, chunked prompts, cached prefixes and recomputation after a preemption all follow from this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from gearshift.platform.engine.blocks import BlockPool
from gearshift.platform.engine.fairness import FairQueue
from gearshift.platform.engine.pacing import Load, Pacer
from gearshift.platform.engine.sequence import Chunk, Sampled, Sequence, Step, Token
from gearshift.platform.request import ServiceClass

CLASSES: tuple[ServiceClass, ...] = ("interactive", "batch")
"""In order of precedence."""


class Draft:
    """A step while it is being put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: list[Chunk] = []
        self.load = Load()
        self.streams = 0
        self.limit: float | None = None  # seconds, once there are streams to protect

    @property
    def others(self) -> int:
        return self.load.rows - self.streams

    def add(self, sequence: Sequence, rows: int) -> None:
        start = sequence.num_computed
        self.chunks.append(Chunk(sequence, start, start + rows))
        self.load = self.load.plus(rows, start)
        self.budget -= rows


class Scheduler:
    """Owns the queues: every sequence is waiting, running or gone.

    `max_idle_s`: when no batch sequence got anything for so long, the next one becomes interactive, so that none starves.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        target_itl_s: float | None = None,
        max_idle_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.queues = {service: FairQueue() for service in CLASSES}
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._pacer = Pacer(target_itl_s)
        self._max_idle_s = max_idle_s
        self._clock = clock
        self._arrivals = self._turns = 0
        self._batch_served_at = 0.0
        self._draft = Draft(0)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or any(self.queues.values())

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.queues.values()))

    @property
    def queued_tokens(self) -> int:
        """Of prompts, that are still to be computed; each running stream's next token is none."""
        waiting = sum(sequence.num_tokens for queue in self.queues.values() for sequence in queue)
        return waiting + sum(sequence.remaining - 1 for sequence in self.running)

    @property
    def dispersion(self) -> float:
        """Weighted tokens between the most and the least served of the tenants that wait, in the worse class."""
        return max(queue.dispersion for queue in self.queues.values())

    def add(self, sequence: Sequence) -> None:
        """The caller has made sure that the sequence fits the pool when it is alone."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        if sequence.service == "batch" and not any(self._batch()):
            self._batch_served_at = self._clock()
        self.queues[sequence.service].add(sequence)

    def schedule(self) -> Step:
        """Class by class: first the running streams, then prompts that have begun, then new ones while budget, seats,
        blocks and the streams' rhythm allow."""
        self._promote()
        draft = self._draft = Draft(self.max_num_batched_tokens)
        for service in CLASSES:
            running = [sequence for sequence in self.running if sequence.service == service]
            running.sort(key=_turn)
            if service == "interactive":
                self._extend_streams(draft, running)
            for sequence in running:
                self._extend(draft, sequence)
            self._admit(draft, service)
        return tuple(draft.chunks)

    def update(self, step: Step, sampled: list[Sampled], seconds: float = 0.0) -> list[Token]:
        """Takes in what the runner computed: one token for each chunk that samples, in their order."""
        if step:
            self._pacer.observe(self._draft.load, self._draft.streams, seconds)
        if any(chunk.sequence.service == "batch" for chunk in step):
            self._batch_served_at = self._clock()
        chosen = iter(sampled)
        tokens: list[Token] = []
        for sequence, _, end in step:
            samples = end == sequence.num_tokens
            sequence.num_computed = end
            self.pool.publish(sequence)
            if samples:
                newest = next(chosen)
                sequence.output_ids.append(newest.id)
                token = Token(sequence, newest, sequence.finish_reason())
                tokens.append(token)
                self.queues[sequence.service].charge(sequence.tenant, outputs=1)
                if token.finish_reason:
                    self.remove(sequence)
        return tokens

    def remove(self, sequence: Sequence) -> None:
        """Finished or aborted: frees all it held. Unknown sequences are ignored, since an abort may come late."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.queues[sequence.service]:
            self.queues[sequence.service].remove(sequence)
        self.pool.release(sequence)

    def check_integrity(self) -> None:
        self.pool.check_integrity(self.running)
        assert len(self.running) <= self.max_num_seqs
        assert not any(sequence.blocks for queue in self.queues.values() for sequence in queue)

    def _extend_streams(self, draft: Draft, running: list[Sequence]) -> None:
        """Interactive sequences that decode, each its one token; what they need sets the limit for all others."""
        streams = [sequence for sequence in running if sequence.remaining == 1]
        for sequence in streams:
            self._extend(draft, sequence)
            running.remove(sequence)
        if draft.chunks:
            draft.streams, draft.limit = len(draft.chunks), self._pacer.limit(draft.load)

    def _extend(self, draft: Draft, sequence: Sequence) -> None:
        """Gives the sequence what the step has left for it, if it has blocks or can get them."""
        if sequence not in self.running:  # preempted for one before it
            return
        rows = self._rows(draft, sequence)
        if rows and self._make_room(draft, sequence, sequence.num_computed + rows):
            self.pool.grow(sequence, sequence.num_computed + rows)
            draft.add(sequence, rows)
            self._turns += 1
            sequence.turn = self._turns

    def _rows(self, draft: Draft, sequence: Sequence) -> int:
        """Never nothing for the first that is not a stream: a target out of reach must not stop all other work."""
        wanted = min(sequence.remaining, draft.budget)
        if draft.limit is None or not wanted:
            return wanted
        rows = self._pacer.room(draft.load, sequence.num_computed, wanted, draft.limit, draft.others)
        return max(rows, 0 if draft.others else 1)

    def _admit(self, draft: Draft, service: ServiceClass) -> None:
        queue = self.queues[service]
        while queue and draft.budget:
            sequence = queue.first()
            if draft.limit is not None and draft.others and not self._rows(draft, sequence):
                return
            if not self._free_blocks(draft, sequence) or not self._free_seat(draft, service):
                return  # blocks first: a seat taken for one that then finds no blocks would be taken in vain
            queue.remove(sequence)
            if self.pool.admit(sequence):
                queue.charge(sequence.tenant, inputs=len(sequence.prompt_ids) - sequence.cached_tokens)
            self.running.append(sequence)
            self._extend(draft, sequence)

    def _free_seat(self, draft: Draft, service: ServiceClass) -> bool:
        if len(self.running) < self.max_num_seqs:
            return True
        lower = self._preemptable(draft, service)
        if lower:
            self._preempt(lower[-1])
        return bool(lower)

    def _free_blocks(self, draft: Draft, sequence: Sequence) -> bool:
        """Preempts lower classes for an arrival, but only if that is enough."""
        if self.pool.can_admit(sequence):
            return True
        lower = self._preemptable(draft, sequence.service)
        if not lower or not self.pool.can_admit(sequence, self.pool.exclusive(lower)):
            return False
        while lower and not self.pool.can_admit(sequence):
            self._preempt(lower.pop())
        return self.pool.can_admit(sequence)

    def _preemptable(self, draft: Draft, service: ServiceClass) -> list[Sequence]:
        """Running sequences of lower classes that this step does not need, the first to go last."""
        planned = {id(chunk.sequence) for chunk in draft.chunks}
        lower = [each for each in self.running if CLASSES.index(each.service) > CLASSES.index(service)]
        return sorted((each for each in lower if id(each) not in planned), key=_precedence)

    def _make_room(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        """Preempts the lowest and youngest until the sequence can grow. False if those that are left go before it: it
        keeps what it has and waits for them."""
        if self.pool.can_grow(sequence, tokens):
            return True
        planned = {id(chunk.sequence) for chunk in draft.chunks}
        others = sorted((each for each in self.running if id(each) not in planned), key=_precedence)
        while others and others[-1] is not sequence and not self.pool.can_grow(sequence, tokens):
            self._preempt(others.pop())
        return self.pool.can_grow(sequence, tokens)

    def _preempt(self, sequence: Sequence) -> None:
        """Gives its blocks back and lets it recompute them later; its tokens, and so its output, stay."""
        self.running.remove(sequence)
        self.pool.release(sequence)
        self.queues[sequence.service].add(sequence)
        self.num_preemptions += 1

    def _batch(self) -> Iterator[Sequence]:
        """Batch sequences in the order in which they are to be helped: running ones first."""
        yield from sorted((each for each in self.running if each.service == "batch"), key=_turn)
        if self.queues["batch"]:
            yield self.queues["batch"].first()

    def _promote(self) -> None:
        """One at a time: to lift all that wait would only crowd the interactive ones."""
        if self._clock() - self._batch_served_at < self._max_idle_s:
            return
        starved = next(self._batch(), None)
        if starved is None:
            return
        if starved not in self.running:
            self.queues["batch"].remove(starved)
            self.queues["interactive"].add(starved)
        starved.service = "interactive"
        self._batch_served_at = self._clock()


def _precedence(sequence: Sequence) -> tuple[int, int]:
    return CLASSES.index(sequence.service), sequence.arrival


def _turn(sequence: Sequence) -> int:
    return sequence.turn
