"""What stands between two matrix products of a Llama-like layer, one pass over the rows each.

All arrays are flat; `width` is the length of a row. Inputs are float32 or bfloat16 (seen as uint16), sums are float32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gearshift.platform.engine.kernels.simd import (
    LANES,
    absolute,
    add,
    div,
    exp,
    fma,
    largest,
    load,
    maximum,
    mul,
    rint,
    splat,
    store,
    sub,
    total,
)

TERM = 256
"""An activation in two int8 terms is `TERM * high + low`."""
ZERO_POINT = 128
"""int8 activations are sent as uint8 with this zero point: the form that VNNI instructions take."""


@njit(nogil=True, cache=True)
def normalize(rows, at, weight, epsilon, width, out, to):
    """RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467, equation 4) of one row."""
    squares = splat(np.float32(0.0))
    for c in range(0, width, LANES):
        x = load(rows, at + c)
        squares = fma(x, x, squares)
    scale = splat(np.float32(1.0) / np.sqrt(total(squares) / np.float32(width) + epsilon))
    for c in range(0, width, LANES):
        store(out, to + c, mul(mul(load(rows, at + c), scale), load(weight, c)))


@njit(nogil=True, cache=True)
def add_norm(residual, update, weight, epsilon, width, out):
    """`residual += update; out = rms_norm(residual) * weight`; an empty update adds nothing."""
    for i in range(residual.size // width):
        at = i * width
        if update.size:
            for c in range(0, width, LANES):
                store(residual, at + c, add(load(residual, at + c), load(update, at + c)))
        normalize(residual, at, weight, epsilon, width, out, at)


@njit(nogil=True, cache=True)
def rotate(rows, positions, cos, sin, heads, kv_heads, dim, query_norm, key_norm, epsilon, out):
    """Rotary embedding of the queries and keys of [tokens, heads + 2 * kv_heads, dim], values copied; to float32.

    RoFormer (Su et al. 2021, arXiv 2104.09864, section 3.2) in the half-split form of Llama. cos, sin: [positions, dim].
    query_norm, key_norm: [dim], applied to each head first (Qwen3), or empty.
    """
    half, width = dim // 2, (heads + 2 * kv_heads) * dim
    scratch = np.empty(dim, np.float32)
    for i in range(positions.size):
        angle = positions[i] * dim
        for h in range(heads + kv_heads):
            at = i * width + h * dim
            norm = query_norm if h < heads else key_norm
            if norm.size:
                normalize(rows, at, norm, epsilon, dim, scratch, 0)
            else:
                for c in range(0, dim, LANES):
                    store(scratch, c, load(rows, at + c))
            for c in range(0, half, LANES):
                left, right = load(scratch, c), load(scratch, half + c)
                store(out, at + c, sub(mul(left, load(cos, angle + c)), mul(right, load(sin, angle + c))))
                turned = mul(left, load(sin, angle + half + c))
                store(out, at + half + c, fma(right, load(cos, angle + half + c), turned))
        for c in range((heads + kv_heads) * dim, width, LANES):
            store(out, i * width + c, load(rows, i * width + c))


@njit(nogil=True, cache=True)
def silu_mul(rows, width, out):
    """[n, 2 * width] of gate and up to silu(gate) * up (SwiGLU, Shazeer 2020, arXiv 2002.05202)."""
    one, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
    for i in range(out.size // width):
        at = i * 2 * width
        for c in range(0, width, LANES):
            gate = load(rows, at + c)
            swish = div(gate, add(one, exp(sub(zero, gate))))
            store(out, i * width + c, mul(swish, load(rows, at + width + c)))


@njit(nogil=True, cache=True)
def quantize(rows, width, terms, out, scales):
    """Symmetric, with one scale a row, so that a request's numbers never depend on its neighbours.

    terms: 1, `row = scale * term` of 8 bits, or 2, `row = scale * (TERM * high + low)` of 15 bits, for rows that one term
    does not hold well enough. out: uint8 [terms * n, width] around ZERO_POINT, the high terms of all rows first; scales: [n].
    """
    n = scales.size
    offset, step, half = splat(np.float32(ZERO_POINT)), splat(np.float32(TERM)), splat(np.float32(0.5))
    for i in range(n):
        at = i * width
        top = splat(np.float32(0.0))
        for c in range(0, width, LANES):
            top = maximum(top, absolute(load(rows, at + c)))
        scales[i] = max(largest(top), np.float32(1e-20)) / np.float32(127 if terms == 1 else 127 * TERM)
        inverse = splat(np.float32(1.0) / scales[i])
        if terms == 1:
            for c in range(0, width, LANES):
                store(out, at + c, add(rint(mul(load(rows, at + c), inverse)), offset))
            continue
        for c in range(0, width, LANES):
            whole = rint(mul(load(rows, at + c), inverse))
            high = rint(div(add(whole, half), step))  # ties go up, so that low is in [-128, 127]
            store(out, at + c, add(high, offset))
            store(out, (n + i) * width + c, add(sub(whole, mul(high, step)), offset))


@njit(nogil=True, cache=True)
def rescale(products, scales, terms, bias, width):
    """Joins the terms in place: [terms * n, width] of products to [n, width], with the rows' scales and the bias.

    bias: [width] or empty.
    """
    n, step = scales.size, splat(np.float32(TERM))
    whole = width - width % LANES
    for i in range(n):
        at, low, scale = i * width, (n + i) * width, splat(scales[i])
        for c in range(0, whole, LANES):
            value = load(products, at + c)
            if terms == 2:
                value = fma(value, step, load(products, low + c))
            value = mul(value, scale)
            if bias.size:
                value = add(value, load(bias, c))
            store(products, at + c, value)
        for c in range(whole, width):  # vocabularies come in every size
            number = products[at + c]
            if terms == 2:
                number = number * np.float32(TERM) + products[low + c]
            number *= scales[i]
            if bias.size:
                number += bias[c]
            products[at + c] = number


@njit(nogil=True, cache=True)
def multiply_row(quantized, weight, scales, width, terms, first, end, out):
    """Products `first` to `end` of one quantized row with int8 weights [n, width], at the speed of memory.

    Whole numbers in float32 are exact below 2^24, so this equals the integer product that a batch takes. quantized: what
    `quantize` made of the row; scales: [n]; out: float32 [terms, n].
    """
    n = scales.size
    row = np.empty(terms * width, np.float32)
    for c in range(terms * width):
        row[c] = np.float32(quantized[c]) - np.float32(ZERO_POINT)
    for j in range(first, end):
        at = j * width
        high, low = splat(np.float32(0.0)), splat(np.float32(0.0))
        if terms == 1:
            for c in range(0, width, LANES):
                high = fma(load(weight, at + c), load(row, c), high)
        else:
            for c in range(0, width, LANES):
                w = load(weight, at + c)
                high = fma(w, load(row, c), high)
                low = fma(w, load(row, width + c), low)
            out[n + j] = total(low) * scales[j]
        out[j] = total(high) * scales[j]
