"""A step as arrays: all its tokens are rows, one after the other, so that nothing is padded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gearshift.platform.engine.sequence import Chunk, Step

Ints = NDArray[np.int64]


class Rows(NamedTuple):
    """T rows of S sequences. Plain numpy: a runner puts on its device what it needs there."""

    tokens: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T] where the new keys and values go: block * block_size + offset
    tables: Ints  # [S, W] blocks of each sequence, 0 beyond its own
    first: Ints  # [S] first row of each sequence
    counts: Ints  # [S] its rows
    starts: Ints  # [S] position of its first row
    sampled: (
        Ints  # [N] rows whose logits are wanted, in the order of the chunks: scored ones, then the one that samples
    )


def rows_of(step: Step, block_size: int) -> Rows:
    starts = np.array([chunk.start for chunk in step], np.int64)
    counts = np.array([chunk.end - chunk.start for chunk in step], np.int64)
    first = np.cumsum(counts) - counts
    tables = np.zeros((len(step), max(len(chunk.sequence.blocks) for chunk in step)), np.int64)
    tokens: list[int] = []
    for table, (sequence, start, end) in zip(tables, step, strict=True):
        table[: len(sequence.blocks)] = sequence.blocks
        tokens += sequence.tokens(start, end)
    owner = np.repeat(np.arange(len(step)), counts)
    positions = np.arange(len(tokens)) - np.repeat(first - starts, counts)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    sampled = np.array(
        [row for at, chunk in zip(first, step, strict=True) for row in _wanted(int(at), chunk)], np.int64
    )
    return Rows(np.array(tokens, np.int64), positions, slots, tables, first, counts, starts, sampled)


def _wanted(first: int, chunk: Chunk) -> list[int]:
    """Rows whose logits are wanted: those before the prompt tokens that are scored, and the last when it samples."""
    scored = [first + place - 1 - chunk.start for place in chunk.scored]
    return [*scored, first + chunk.end - chunk.start - 1] if chunk.samples else scored
