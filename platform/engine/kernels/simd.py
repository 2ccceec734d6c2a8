"""Sixteen float32 lanes as a value inside numba functions, so that a kernel says which register holds what.

LLVM turns one such value into one AVX-512 register, two AVX2 registers or four NEON registers: nothing here is tied to a
processor, and nothing needs a C++ compiler on the machine that serves. Arrays are flat; bfloat16 is seen as uint16 (numpy
has no bfloat16), int8 as whole numbers.

numba keeps compiled kernels beside their source and looks only at that file: after a change here, remove its __pycache__.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16
_F32, _I32 = ir.FloatType(), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


class Float32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = Float32x16()


@register_model(Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend: Any) -> None:
        super().__init__(manager, frontend, _VECTOR)


def _floats(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [value] * LANES)


def _ints(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * LANES)


def _broadcast(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _ints(0))


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, value=array).data
    element = context.get_data_type(array_type.dtype)
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(element, LANES).as_pointer())


def _llvm(builder: Any, name: str, result: Any, *args: Any, **flags: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [argument.type for argument in args]), name
    )
    return builder.call(function, args, **flags)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _llvm(builder, "llvm.fma.v16f32", _VECTOR, a, b, c)


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """`array[index : index + 16]` as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *args)
        lanes = builder.load(pointer, align=array.dtype.bitwidth // 8)
        if array.dtype == types.float32:
            return lanes
        if array.dtype == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(lanes, _INTS), _ints(16)), _VECTOR)
        return builder.sitofp(builder.sext(lanes, _INTS), _VECTOR)

    return float32x16(array, types.intp), generate


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Asks for the cache line of `array[index]`, to be there when it is needed. Any index is safe."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        read, keep_long, into_data_cache = (ir.Constant(_I32, flag) for flag in (0, 3, 1))
        _llvm(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, keep_long, into_data_cache)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _round(builder: Any, lanes: Any) -> Any:
    """Half to even, as every conversion here."""
    return _llvm(builder, "llvm.rint.v16f32", _VECTOR, lanes)


def _to_bfloat16(builder: Any, lanes: Any) -> Any:
    bits = builder.bitcast(lanes, _INTS)
    odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _ints(0x7FFF))), _ints(16))
    return builder.trunc(rounded, ir.VectorType(ir.IntType(16), LANES))


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index : index + 16] = value`, rounded to the array's type. Integers must be in range."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, lanes = array.dtype, args[2]
        if target == types.uint16:
            lanes = _to_bfloat16(builder, lanes)
        elif target != types.float32:
            whole = builder.fptosi(_round(builder, lanes), _INTS)
            lanes = builder.trunc(whole, ir.VectorType(ir.IntType(target.bitwidth), LANES))
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(lanes, pointer, align=target.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, float32x16), generate


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    """The same float32 in every lane."""
    return float32x16(types.float32), lambda context, builder, signature, args: _broadcast(builder, args[0], _VECTOR)


def _elementwise(count: int, emit: Callable[..., Any]) -> Any:
    """An intrinsic of `count` vectors; `emit(builder, *vectors)` writes its instructions."""
    signature = float32x16(*[float32x16] * count)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    if count == 1:
        return intrinsic(lambda typing, a: (signature, generate))
    if count == 2:
        return intrinsic(lambda typing, a, b: (signature, generate))
    return intrinsic(lambda typing, a, b, c: (signature, generate))


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _minimum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _exp(builder: Any, x: Any) -> Any:
    """e^x = 2^n e^r with |r| <= ln(2)/2 and a polynomial of degree 6 (Cephes, expf); error below 2 ulp."""
    x = _minimum(builder, _maximum(builder, x, _floats(-87.3)), _floats(88.0))
    n = _round(builder, builder.fmul(x, _floats(math.log2(math.e))))
    r = _fma(builder, n, _floats(-0.693359375), x)  # ln(2) in two parts
    r = _fma(builder, n, _floats(2.12194440e-4), r)
    poly = _floats(1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        poly = _fma(builder, poly, r, _floats(term))
    poly = _fma(builder, poly, builder.fmul(r, r), builder.fadd(r, _floats(1.0)))
    power = builder.shl(builder.add(builder.fptosi(n, _INTS), _ints(127)), _ints(23))
    return builder.fmul(poly, builder.bitcast(power, _VECTOR))


add = _elementwise(2, lambda builder, a, b: builder.fadd(a, b))
sub = _elementwise(2, lambda builder, a, b: builder.fsub(a, b))
mul = _elementwise(2, lambda builder, a, b: builder.fmul(a, b))
div = _elementwise(2, lambda builder, a, b: builder.fdiv(a, b))
maximum = _elementwise(2, _maximum)
fma = _elementwise(3, _fma)
"""a * b + c, rounded once."""
exp = _elementwise(1, _exp)
rint = _elementwise(1, _round)
absolute = _elementwise(1, lambda builder, a: _llvm(builder, "llvm.fabs.v16f32", _VECTOR, a))


@intrinsic
def total(typing: Any, value: Any) -> Any:
    """Sum of the lanes, in a fixed order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(_F32, -0.0)
        return _llvm(builder, "llvm.vector.reduce.fadd.v16f32", _F32, zero, args[0], fastmath=("reassoc",))

    return types.float32(float32x16), generate


@intrinsic
def largest(typing: Any, value: Any) -> Any:
    """Largest lane; no lane may be NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _llvm(builder, "llvm.vector.reduce.fmax.v16f32", _F32, args[0], fastmath=("nnan", "nsz"))

    return types.float32(float32x16), generate


@intrinsic
def keep(typing: Any, value: Any, first: Any, end: Any, other: Any) -> Any:
    """Lanes `first <= lane < end` of `value`, and `other` in the rest."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(_INTS, list(range(LANES)))
        low, high = (_broadcast(builder, builder.trunc(bound, _I32), _INTS) for bound in args[1:3])
        kept = builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high))
        return builder.select(kept, args[0], _broadcast(builder, args[3], _VECTOR))

    return float32x16(float32x16, types.intp, types.intp, types.float32), generate
