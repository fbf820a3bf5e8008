"""Integer arithmetic, also with carries (PTX "Integer" and "Extended-Precision Integer Arithmetic").

Values wrap modulo 2**bits; two's complement makes most of them the same for signed and unsigned types.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from attn4.emulator.isa.registry import (
    INTEGER,
    WIDTHS,
    Array,
    Function,
    Modifiers,
    Spread,
    UnsupportedInstruction,
    operand_count,
    pure,
    value_type,
)
from attn4.emulator.ptx.module import Instruction

_SCALAR: Final = tuple(sorted(INTEGER - {"u16x2", "s16x2"}))
_PACKED: Final = ("u16x2", "s16x2")
_U32: Final = np.dtype(np.uint32)
_U64: Final = np.dtype(np.uint64)


def lane_type(kind: str) -> np.dtype[Any]:
    """The numpy type of one element of type `kind` in arithmetic; both halves of a pair are elements."""
    kind = kind.removesuffix("x2")
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{WIDTHS[kind] // 8}")


def register_type(kind: str) -> np.dtype[Any]:
    """The numpy type of a register that holds a value of type `kind`."""
    return np.dtype(f"u{WIDTHS[kind] // 8}")


def _elementwise(kind: str, function: Function) -> Function:
    """`function` on views of the registers in the arithmetic type."""
    inside, outside = lane_type(kind), register_type(kind)
    if inside == outside:
        return function

    def signed(*sources: Array) -> Array:
        result: Array = function(*(source.view(inside) for source in sources))
        return result.view(outside)

    return signed


def _wrapping(kind: str, function: Function) -> Function:
    """`function` where signs play no part: on unsigned elements."""
    return function if kind in _SCALAR else _elementwise("u16x2", function)


def _saturated(function: Function) -> Function:
    def saturate(*sources: Array) -> Array:
        wide = function(*(source.view(np.int32).astype(np.int64) for source in sources))
        clamped: Array = np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)
        return clamped.view(_U32)

    return saturate


def _sum(i: Instruction, function: Function) -> Function:
    modifiers = Modifiers(i)
    operand_count(i, 3)
    kind = modifiers.one_of(*_SCALAR, *_PACKED)
    saturate = modifiers.flag("sat")
    modifiers.done()
    if saturate and kind != "s32":
        raise UnsupportedInstruction(i, f"modifier sat with type {kind}")
    return _saturated(function) if saturate else _wrapping(kind, function)


def _carrying(i: Instruction) -> str:
    modifiers = Modifiers(i)
    modifiers.flag("cc")
    kind = modifiers.one_of("s32", "u32", "b32", "s64", "u64", "b64")
    modifiers.done()
    return kind


@pure("add", kinds=INTEGER)
def add(i: Instruction) -> Function:
    """Integer add: d = a + b; .sat (.s32) clamps to MININT..MAXINT.

    add.cc: "The carry-out value is written to CC.CF".
    """
    if "cc" not in i.modifiers:
        return _sum(i, np.add)
    _carrying(i)

    def with_carry(a: Array, b: Array) -> tuple[Array, Array]:
        total = a + b
        return total, total < a

    return with_carry


@pure("sub", kinds=INTEGER)
def sub(i: Instruction) -> Function:
    """Integer sub: d = a - b; .sat as in add. sub.cc: "The borrow-out value is written to CC.CF"."""
    if "cc" not in i.modifiers:
        return _sum(i, np.subtract)
    _carrying(i)
    return lambda a, b: (a - b, a < b)


@pure("addc")
def addc(i: Instruction) -> Function:
    """Extended-precision addc: d = a + b + CC.CF; .cc writes the carry-out."""
    _carrying(i)
    keep = "cc" in i.modifiers

    def with_carry(a: Array, b: Array, carry: Array) -> Array | tuple[Array, Array]:
        partial = a + b
        total = partial + carry
        return (total, (partial < a) | (total < partial)) if keep else total

    return with_carry


@pure("subc")
def subc(i: Instruction) -> Function:
    """Extended-precision subc: d = a - (b + CC.CF); .cc writes the borrow-out."""
    _carrying(i)
    keep = "cc" in i.modifiers

    def with_borrow(a: Array, b: Array, borrow: Array) -> Array | tuple[Array, Array]:
        partial = a - b
        total = partial - borrow
        return (total, (a < b) | (partial < borrow)) if keep else total

    return with_borrow


def _high(a: Array, b: Array) -> Array:
    """Upper half of the product of two integers of one type, as that type."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{bits // 4}")
        upper: Array = (a.astype(wide) * b.astype(wide)) >> wide.type(bits)
        return upper.astype(a.dtype)
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    x, y = a.view(_U64), b.view(_U64)
    x1, x0, y1, y0 = x >> shift, x & low, y >> shift, y & low
    middle = x1 * y0 + (x0 * y0 >> shift)
    other = x0 * y1 + (middle & low)
    high: Array = x1 * y1 + (middle >> shift) + (other >> shift)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, 0).astype(_U64) - np.where(b < 0, x, 0).astype(_U64)
    return high.view(a.dtype)


def _product(i: Instruction, mode: str, kind: str) -> Function:
    """Product of a and b: lower half, upper half or all of it; in registers."""
    if mode == "lo":
        return np.multiply
    inside, outside = lane_type(kind), register_type(kind)
    if mode == "hi":
        return lambda a, b: _high(a.view(inside), b.view(inside)).view(outside)
    if WIDTHS[kind] == 64:
        raise UnsupportedInstruction(i, f"modifier wide with type {kind}")
    wide, wide_register = np.dtype(f"{inside.kind}{inside.itemsize * 2}"), np.dtype(f"u{inside.itemsize * 2}")
    if inside == outside:
        return lambda a, b: a.astype(wide) * b.astype(wide)
    return lambda a, b: (a.view(inside).astype(wide) * b.view(inside).astype(wide)).view(wide_register)


@pure("mul", kinds=INTEGER)
def mul(i: Instruction) -> Function:
    """Integer mul: .lo and .hi give half of the product, .wide all of it in a register of twice the width."""
    modifiers = Modifiers(i)
    operand_count(i, 3)
    mode = modifiers.one_of("lo", "hi", "wide")
    kind = modifiers.one_of(*_SCALAR)
    modifiers.done()
    return _product(i, mode, kind)


def _third_is_wide(i: Instruction) -> tuple[str, ...]:
    kind = value_type(i)
    return (kind, kind, f"{kind[0]}{WIDTHS[kind] * 2}" if "wide" in i.modifiers else kind)


@pure("mad", kinds=INTEGER, types=_third_is_wide)
def mad(i: Instruction) -> Function:
    """Integer mad: d = a * b + c, the product as in mul; .sat only with .hi.s32; .cc as in add."""
    modifiers = Modifiers(i)
    operand_count(i, 4)
    mode = modifiers.one_of("lo", "hi", "wide")
    kind = modifiers.one_of(*_SCALAR)
    saturate, carry = modifiers.flag("sat"), modifiers.flag("cc")
    modifiers.done()
    product = _product(i, mode, kind)
    if saturate:
        if (mode, kind) != ("hi", "s32"):
            raise UnsupportedInstruction(i, f"modifier sat with {mode}.{kind}")
        add_saturated = _saturated(np.add)
        return lambda a, b, c: add_saturated(product(a, b), c)
    if carry:

        def with_carry(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
            total = product(a, b) + c
            return total, total < c

        return with_carry
    if mode == "lo":
        return lambda a, b, c: a * b + c
    return lambda a, b, c: product(a, b) + c


@pure("madc")
def madc(i: Instruction) -> Function:
    """Extended-precision madc: d = (a * b).lo or .hi + c + CC.CF; .cc writes the carry-out."""
    modifiers = Modifiers(i)
    mode = modifiers.one_of("lo", "hi")
    kind = modifiers.one_of("s32", "u32", "s64", "u64")
    keep = modifiers.flag("cc")
    modifiers.done()
    product = _product(i, mode, kind)

    def with_carry(a: Array, b: Array, c: Array, carry: Array) -> Array | tuple[Array, Array]:
        partial = product(a, b) + c
        total = partial + carry
        return (total, (partial < c) | (total < partial)) if keep else total

    return with_carry


@pure("sad", kinds=INTEGER)
def sad(i: Instruction) -> Function:
    """Integer sad: d = c + ((a < b) ? b - a : a - b)."""
    kind = _plain(i, 4)
    return _elementwise(kind, lambda a, b, c: c + np.where(a < b, b - a, a - b))


def _plain(i: Instruction, operands: int, *kinds: str) -> str:
    """The type of an instruction without other modifiers."""
    operand_count(i, operands)
    modifiers = Modifiers(i)
    kind = modifiers.one_of(*(kinds or _SCALAR))
    modifiers.done()
    return kind


def _magnitude(a: Array) -> Array:
    return np.abs(a).view(f"u{a.dtype.itemsize}")


def _with_sign(magnitude: Array, sign: Array) -> Array:
    """The magnitude negated where `sign` (of a signed type) is negative."""
    negative = (sign >> _SIGN_BITS[sign.dtype][len(sign)]).view(magnitude.dtype)
    result: Array = (magnitude ^ negative) - negative
    return result


_ZEROS: Final = {np.dtype(f"u{size}"): Spread(0, f"u{size}") for size in (2, 4, 8)}
_SIGN_BITS: Final = {np.dtype(f"i{size}"): Spread(8 * size - 1, f"i{size}") for size in (2, 4, 8)}


def _ones_where_zero(divisor: Array, result: Array) -> Array:
    zero = divisor == _ZEROS[divisor.dtype][len(divisor)]
    if 1 in zero.tobytes():
        result = np.where(zero, ~np.zeros_like(result), result)
    return result


@pure("div", kinds=INTEGER)
def div(i: Instruction) -> Function:
    """Integer div: d = a / b towards zero. "Division by zero yields an unspecified,
    machine-specific value": all ones.
    """
    kind = _plain(i, 3)
    if kind[0] == "u":
        return lambda a, b: _ones_where_zero(b, np.floor_divide(a, b))
    inside = lane_type(kind)

    def signed(a: Array, b: Array) -> Array:
        x, y = a.view(inside), b.view(inside)
        return _ones_where_zero(b, _with_sign(_magnitude(x) // _magnitude(y), x ^ y))

    return signed


@pure("rem", kinds=INTEGER)
def rem(i: Instruction) -> Function:
    """Integer rem: d = a % b with the sign of a; by zero unspecified: all ones."""
    kind = _plain(i, 3)
    if kind[0] == "u":
        return lambda a, b: _ones_where_zero(b, np.remainder(a, b))
    inside = lane_type(kind)

    def signed(a: Array, b: Array) -> Array:
        x, y = a.view(inside), b.view(inside)
        return _ones_where_zero(b, _with_sign(_magnitude(x) % _magnitude(y), x))

    return signed


@pure("abs", kinds=INTEGER)
def absolute(i: Instruction) -> Function:
    """Integer abs: d = |a|; only for signed integers. MININT stays as it is."""
    return _elementwise(_plain(i, 2, "s16", "s32", "s64"), np.abs)


@pure("neg", kinds=INTEGER)
def neg(i: Instruction) -> Function:
    """Integer neg: d = -a; only for signed integers."""
    _plain(i, 2, "s16", "s32", "s64")
    return np.negative


def _extreme(i: Instruction, function: np.ufunc) -> Function:
    operand_count(i, 3)
    modifiers = Modifiers(i)
    relu = modifiers.flag("relu")
    kind = modifiers.one_of(*_SCALAR, *_PACKED)
    modifiers.done()
    if not relu:
        return _elementwise(kind, function)
    if kind not in ("s32", "s16x2"):
        raise UnsupportedInstruction(i, f"modifier relu with type {kind}")
    zero = Spread(0, lane_type(kind))
    return _elementwise(kind, lambda a, b: np.maximum(function(a, b), zero[len(a)]))


@pure("min", kinds=INTEGER)
def minimum(i: Instruction) -> Function:
    """Integer min: d = (a < b) ? a : b; .relu clamps a negative result to 0 (.s32, .s16x2)."""
    return _extreme(i, np.minimum)


@pure("max", kinds=INTEGER)
def maximum(i: Instruction) -> Function:
    """Integer max: d = (a > b) ? a : b; .relu clamps a negative result to 0 (.s32, .s16x2)."""
    return _extreme(i, np.maximum)
