"""Attention over KV blocks on the CPU: no padding, no copy of the history, and each key is read once for a query tile.

Layout of one layer's cache, chosen so that sixteen tokens or sixteen channels are one vector:
    keys   [blocks, kv_heads, dim, block_size]    values [blocks, kv_heads, block_size, dim]
    scales [blocks, kv_heads, block_size]         of int8 keys and values, one a token and head
A row's result depends on its own tokens alone, in one fixed order, whatever else is in the step and however its prompt
was cut: the same request gives the same bits alone, in a batch, in chunks and after a preemption.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gearshift.platform.engine.kernels.simd import (
    LANES,
    absolute,
    exp,
    fma,
    keep,
    largest,
    load,
    maximum,
    mul,
    prefetch,
    splat,
    store,
    sub,
    total,
)

LOWEST = np.float32(-1e30)
"""A masked score: finite, so that the difference of two of them is not NaN."""


@njit(nogil=True, cache=True)
def store_row(row, at, dim, scratch):
    """Rounds `row[at : at + dim]` into scratch; returns the scale, 1 where scratch is a float type."""
    scale = np.float32(1.0)
    if scratch.itemsize == 1:
        top = splat(np.float32(0.0))
        for c in range(0, dim, LANES):
            top = maximum(top, absolute(load(row, at + c)))
        scale = max(largest(top), np.float32(1e-20)) / np.float32(127.0)
    for c in range(0, dim, LANES):
        store(scratch, c, mul(load(row, at + c), splat(np.float32(1.0) / scale)))
    return scale


@njit(nogil=True, cache=True)
def write_kv(rows, key_at, value_at, stride, slots, keys, values, key_scales, value_scales, kv_heads, dim, block):
    """Puts the keys and values of new tokens where their slots (block * block_size + offset) are.

    rows: token i has its keys [kv_heads, dim] at `i * stride + key_at` and its values at `i * stride + value_at`.
    """
    scratch = np.empty(dim, keys.dtype)
    quantized = keys.itemsize == 1
    for i in range(slots.size):
        index, offset = slots[i] // block, slots[i] % block
        for h in range(kv_heads):
            plane = index * kv_heads + h
            scale = store_row(rows, i * stride + key_at + h * dim, dim, scratch)
            for d in range(dim):
                keys[(plane * dim + d) * block + offset] = scratch[d]
            if quantized:
                key_scales[plane * block + offset] = scale
            scale = store_row(rows, i * stride + value_at + h * dim, dim, scratch)
            values[(plane * block + offset) * dim : (plane * block + offset + 1) * dim] = scratch
            if quantized:
                value_scales[plane * block + offset] = scale


@njit(nogil=True, cache=True)
def attend(
    query,
    stride,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    width,
    tiles,
    kv_heads,
    group,
    dim,
    block,
    window,
    scale,
    out,
):
    """softmax(q k^T scale) v with a causal mask, with the running maximum and sum of FlashAttention (Dao et al. 2022,
    arXiv 2205.14135, algorithm 1).

    query: row i has its heads [kv_heads * group, dim] at `i * stride`. tables: [sequences, width] block ids. tiles:
    [n, 4] of (sequence, first row, rows, position of the first row). window: 0, or how many last tokens a row sees.
    out: [rows, heads, dim], float32 or bfloat16. block must be a multiple of 16, dim too.
    """
    most = 1
    for i in range(tiles.shape[0]):
        most = max(most, tiles[i, 2] * group)
    most = (most + 3) // 4 * 4
    scaled = np.zeros(most * dim, np.float32)
    sums = np.zeros(most * dim, np.float32)
    top = np.zeros(most, np.float32)
    mass = np.zeros(most, np.float32)
    weights = np.zeros(4 * LANES, np.float32)
    zero = splat(np.float32(0.0))
    quantized = keys.itemsize == 1
    heads = kv_heads * group
    for i in range(tiles.shape[0]):
        sequence, first, count, position = tiles[i, 0], tiles[i, 1], tiles[i, 2], tiles[i, 3]
        rows = count * group
        last = (position + count - 1) // LANES
        begin = max(0, position - window + 1) // LANES if window else 0
        for h in range(kv_heads):
            for r in range(rows):
                source = (first + r // group) * stride + (h * group + r % group) * dim
                for c in range(0, dim, LANES):
                    store(scaled, r * dim + c, mul(load(query, source + c), splat(scale)))
                    store(sums, r * dim + c, zero)
                top[r] = LOWEST
                mass[r] = np.float32(0.0)
            for part in range(begin, last + 1):
                start = part * LANES  # these sixteen tokens
                index, offset = tables[sequence * width + start // block], start % block
                following = start + LANES if part < last else begin * LANES  # of the next head, then
                next_plane = tables[sequence * width + following // block] * kv_heads + (h if part < last else h + 1)
                next_key = next_plane * dim * block + following % block
                next_value = (next_plane * block + following % block) * dim
                plane = index * kv_heads + h
                key_base = plane * dim * block + offset
                value_base = (plane * block + offset) * dim
                scale_base = plane * block + offset
                for r in range(0, rows, 4):
                    if position + min(r + 3, rows - 1) // group < start:
                        continue
                    q = r * dim
                    s0, s1, s2, s3 = zero, zero, zero, zero
                    for d in range(dim):
                        key = load(keys, key_base + d * block)
                        prefetch(keys, next_key + d * block)
                        s0 = fma(key, splat(scaled[q + d]), s0)
                        s1 = fma(key, splat(scaled[q + dim + d]), s1)
                        s2 = fma(key, splat(scaled[q + 2 * dim + d]), s2)
                        s3 = fma(key, splat(scaled[q + 3 * dim + d]), s3)
                    store(weights, 0, s0)
                    store(weights, LANES, s1)
                    store(weights, 2 * LANES, s2)
                    store(weights, 3 * LANES, s3)
                    for j in range(4):
                        at = position + (r + j) // group
                        end = at + 1 - start
                        low = max(0, at - window + 1 - start) if window else 0
                        score = load(weights, j * LANES)
                        if quantized:
                            score = mul(score, load(key_scales, scale_base))
                        score = keep(score, low, end, LOWEST)
                        new = max(top[r + j], largest(score))
                        weight = keep(exp(sub(score, splat(new))), low, end, np.float32(0.0))
                        if new != top[r + j]:
                            fade = np.float32(np.exp(top[r + j] - new))
                            mass[r + j] *= fade
                            for c in range(0, dim, LANES):
                                place = (r + j) * dim + c
                                store(sums, place, mul(load(sums, place), splat(fade)))
                            top[r + j] = new
                        mass[r + j] += total(weight)
                        if quantized:
                            weight = mul(weight, load(value_scales, scale_base))
                        store(weights, j * LANES, weight)
                    for c in range(0, dim, LANES):
                        a0, a1 = load(sums, q + c), load(sums, q + dim + c)
                        a2, a3 = load(sums, q + 2 * dim + c), load(sums, q + 3 * dim + c)
                        for t in range(LANES):
                            value = load(values, value_base + t * dim + c)
                            prefetch(values, next_value + t * dim + c)
                            a0 = fma(value, splat(weights[t]), a0)
                            a1 = fma(value, splat(weights[LANES + t]), a1)
                            a2 = fma(value, splat(weights[2 * LANES + t]), a2)
                            a3 = fma(value, splat(weights[3 * LANES + t]), a3)
                        store(sums, q + c, a0)
                        store(sums, q + dim + c, a1)
                        store(sums, q + 2 * dim + c, a2)
                        store(sums, q + 3 * dim + c, a3)
            for r in range(rows):
                target = ((first + r // group) * heads + h * group + r % group) * dim
                for c in range(0, dim, LANES):
                    store(out, target + c, mul(load(sums, r * dim + c), splat(np.float32(1.0) / mass[r])))
