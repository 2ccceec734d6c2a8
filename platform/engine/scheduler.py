"""Who computes what in the next step. Plain Python, no tensors: a decision is a value, and a test needs no model.

There is no prefill phase and no decode phase. Every sequence has `num_computed` tokens in the cache and `num_tokens`
known; each step hands out a budget of tokens until the first catches up with the second. Joining and leaving between
steps, chunked prompts and recomputation after a preemption all follow from this.
"""

from __future__ import annotations

from collections import deque

from gearshift.platform.engine.blocks import BlockPool
from gearshift.platform.engine.sequence import Chunk, Sequence, Step, Token


class Scheduler:
    """Owns the queues: every sequence is waiting, running or gone."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """The caller has made sure that the sequence fits the pool when it is alone."""
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """Running sequences first, in order of arrival; then waiting ones while budget, seats and blocks last."""
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        for sequence in list(self.running):
            if budget == 0 or sequence not in self.running:
                continue
            end = min(sequence.num_tokens, sequence.num_computed + budget)
            if not self._make_room(sequence, end):
                continue
            budget -= self._plan(sequence, end, chunks)
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            end = min(sequence.num_tokens, budget)
            if not self.pool.can_grow(sequence, end):
                break
            self.running.append(self.waiting.popleft())
            budget -= self._plan(sequence, end, chunks)
        return tuple(chunks)

    def update(self, step: Step, token_ids: list[int]) -> list[Token]:
        """Takes in what the runner computed: one id for each chunk that samples, in their order."""
        ids = iter(token_ids)
        tokens: list[Token] = []
        for sequence, _, end in step:
            samples = end == sequence.num_tokens
            sequence.num_computed = end
            if samples:
                sequence.output_ids.append(next(ids))
                token = Token(sequence, sequence.output_ids[-1], sequence.finish_reason())
                tokens.append(token)
                if token.finish_reason:
                    self.remove(sequence)
        return tokens

    def remove(self, sequence: Sequence) -> None:
        """Finished or aborted: frees all it held. Unknown sequences are ignored, since an abort may come late."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pool.release(sequence)

    def check_integrity(self) -> None:
        self.pool.check_integrity(self.running)
        assert len(self.running) <= self.max_num_seqs
        assert not any(sequence.blocks for sequence in self.waiting)

    def _plan(self, sequence: Sequence, end: int, chunks: list[Chunk]) -> int:
        self.pool.grow(sequence, end)
        chunks.append(Chunk(sequence, sequence.num_computed, end))
        return end - sequence.num_computed

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Preempts the youngest until the sequence can grow; False if that was the sequence itself."""
        while not self.pool.can_grow(sequence, end):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Gives its blocks back and lets it recompute them later; its tokens, and so its output, stay."""
        self.running.remove(sequence)
        self.pool.release(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
