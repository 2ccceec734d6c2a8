"""The block pool: owns which KV block belongs to whom, and which blocks still hold a prefix that somebody may ask for
again. Plain Python; the tensors are the runner's."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

from gearshift.platform.engine.sequence import Sequence


def chain(parent: bytes, tokens: list[int]) -> bytes:
    """Hash of a full block and everything before it. 128 bits of BLAKE2b: no tenant can aim at another's block."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, counted references, automatic prefix caching.

    A block is held (references > 0) or free. A free block may still be *published*: found by the chained hash of its
    tokens and of all before them, until it is the least recently used one and somebody needs room. Only full blocks
    are published, and nobody writes to a full block, so sharing needs no copies.

    Ask `can_admit`, then `admit`; ask `can_grow`, then `grow`.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.queries = self.hits = 0
        """Prompt tokens that were looked up, and found."""
        self._prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be taken first
        self._published: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that fit when one sequence has the pool to itself."""
        return self.num_blocks * self.block_size

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def can_admit(self, sequence: Sequence, reclaimable: int = 0) -> bool:
        """Whether all its known tokens have room, if `reclaimable` held blocks were freed."""
        prefix = self._match(sequence)
        waiting = sum(1 for block in prefix if not self._references[block])
        missing = self._blocks_for(sequence.num_tokens) - len(prefix)
        return missing + waiting <= len(self._free) + reclaimable

    def admit(self, sequence: Sequence) -> bool:
        """Gives it the cached blocks of its longest known prefix, and new ones for the rest of its tokens. True for the
        first time; what it finds after a preemption is its own."""
        prefix = self._match(sequence)
        for block in prefix:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1
        sequence.blocks = prefix
        sequence.num_published = len(prefix)
        sequence.num_computed = len(prefix) * self.block_size
        first, sequence.admitted = not sequence.admitted, True
        if first:
            sequence.cached_tokens = min(sequence.num_computed, len(sequence.prompt_ids))
            self.queries += len(sequence.prompt_ids)
            self.hits += sequence.cached_tokens
        self.grow(sequence, sequence.num_tokens)
        return first

    def can_grow(self, sequence: Sequence, tokens: int) -> bool:
        return self._blocks_for(tokens) - len(sequence.blocks) <= len(self._free)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Gives the sequence blocks for its first `tokens` tokens."""
        for _ in range(self._blocks_for(tokens) - len(sequence.blocks)):
            block, _ = self._free.popitem(last=False)
            if (known := self._hash_of.pop(block, None)) is not None:
                del self._published[known]
            self._references[block] = 1
            sequence.blocks.append(block)

    def publish(self, sequence: Sequence) -> None:
        """Lets others find the blocks that have become full of computed tokens."""
        if not self._prefix_caching:
            return
        full = sequence.num_computed // self.block_size
        while sequence.num_published < full:
            at = sequence.num_published
            known, block = self._hash(sequence, at), sequence.blocks[at]
            if known not in self._published:  # else another has the same tokens already, and stays the one found
                self._published[known] = block
                self._hash_of[block] = known
            sequence.num_published += 1

    def release(self, sequence: Sequence) -> None:
        """What nobody else holds becomes free: unpublished blocks are taken first, published ones by age, the end of a
        text before its beginning."""
        for block in reversed(sequence.blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)
        sequence.blocks = []
        sequence.num_computed = sequence.num_published = 0

    def hashes(self, sequence: Sequence) -> list[bytes]:
        """Of the full blocks of its prompt that another one's could stand for; the last token is always computed."""
        if not self._prefix_caching or sequence.scores_prompt:
            return []
        count = (len(sequence.prompt_ids) - 1) // self.block_size
        return [self._hash(sequence, at) for at in range(count)]

    def knows(self, known: bytes) -> bool:
        return known in self._published

    def place(self, known: bytes) -> int | None:
        """The block that is found by this hash."""
        return self._published.get(known)

    def adopt(self, known: bytes) -> int | None:
        """A free block that is found by this hash from now on, for the caller to fill; None when there is none, or the hash is
        known."""
        if known in self._published or not self._free:
            return None
        block, _ = self._free.popitem(last=False)
        if (before := self._hash_of.pop(block, None)) is not None:
            del self._published[before]
        self._published[known], self._hash_of[block] = block, known
        self._free[block] = None
        return block

    def exclusive(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that would become free if these were released."""
        held = Counter(block for sequence in sequences for block in sequence.blocks)
        return sum(1 for block, count in held.items() if self._references[block] == count)

    def check_integrity(self, owners: list[Sequence]) -> None:
        """Every block is free or held by as many of `owners` as it counts. Raises AssertionError."""
        held = Counter(block for sequence in owners for block in sequence.blocks)
        assert [held[block] for block in range(self.num_blocks)] == self._references, (
            "a KV block is leaked or miscounted"
        )
        assert set(self._free) == {block for block in range(self.num_blocks) if not held[block]}, "free and held differ"
        assert {block: known for known, block in self._published.items()} == self._hash_of, "published blocks differ"

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the longest known prefix. At least one token stays to be computed: it gives the next one."""
        blocks: list[int] = []
        if self._prefix_caching and not sequence.scores_prompt:
            for at in range((sequence.num_tokens - 1) // self.block_size):
                block = self._published.get(self._hash(sequence, at))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def _hash(self, sequence: Sequence, at: int) -> bytes:
        hashes = sequence.hashes
        while len(hashes) <= at:
            start = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else sequence.salt
            hashes.append(chain(parent, sequence.tokens(start, start + self.block_size)))
        return hashes[at]
