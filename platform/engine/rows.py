"""A step as arrays: all its tokens are rows, one after the other, so that nothing is padded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gearshift.platform.engine.sequence import Step

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
    sampled: Ints  # [N] rows whose logits are wanted, in the order of the chunks that sample


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
        [row + count - 1 for row, count, chunk in zip(first, counts, step, strict=True) if chunk.samples]
    )
    return Rows(np.array(tokens, np.int64), positions, slots, tables, first, counts, starts, sampled.astype(np.int64))
