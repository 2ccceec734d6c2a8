"""The block pool: owns which KV block belongs to whom. Plain Python; the tensors are the runner's."""

from __future__ import annotations

from gearshift.platform.engine.sequence import Sequence


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Ask `can_grow`, then `grow`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that fit when one sequence has the pool to itself."""
        return self.num_blocks * self.block_size

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        return max(0, -(-tokens // self.block_size) - len(sequence.blocks))

    def can_grow(self, sequence: Sequence, tokens: int) -> bool:
        return self._missing(sequence, tokens) <= len(self._free)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Gives the sequence blocks for its first `tokens` tokens."""
        sequence.blocks += [self._free.pop() for _ in range(self._missing(sequence, tokens))]

    def release(self, sequence: Sequence) -> None:
        self._free += reversed(sequence.blocks)
        sequence.blocks.clear()

    def check_integrity(self, owners: list[Sequence]) -> None:
        """Every block is free or belongs to exactly one of `owners`. Raises AssertionError."""
        held = [block for sequence in owners for block in sequence.blocks]
        assert sorted(held + self._free) == list(range(self.num_blocks)), "a KV block is leaked or doubly owned"
