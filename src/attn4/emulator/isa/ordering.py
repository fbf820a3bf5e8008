"""Sign, order and class of floating-point numbers (PTX "Floating Point" and "Half Precision")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from attn4.emulator.isa.floating import Core, half, single
from attn4.emulator.isa.registry import (
    FLOATING,
    WIDTHS,
    Array,
    Function,
    Modifiers,
    Spread,
    UnsupportedInstruction,
    operand_count,
    pure,
)
from attn4.emulator.isa.rounding import canonical, decode, encode, flush, flush_single
from attn4.emulator.ptx.module import Instruction

_F32: Final = np.dtype(np.float32)
_F64: Final = np.dtype(np.float64)
_U16: Final = np.dtype(np.uint16)
_U32: Final = np.dtype(np.uint32)
_U64: Final = np.dtype(np.uint64)


def _repeated(bits: int, kind: str) -> Spread:
    """The bits in each element of a register of type `kind`."""
    width = WIDTHS[kind]
    element = WIDTHS[kind.removesuffix("x2")]
    return Spread(sum(bits << shift for shift in range(0, width, element)), f"u{width // 8}")


def _sign_operation(i: Instruction, function: np.ufunc, *, keep_sign: bool) -> Function:
    operand_count(i, 2)
    modifiers = Modifiers(i)
    kind = modifiers.one_of(*(FLOATING - {"f32x2"}))
    ftz = modifiers.flag("ftz")
    modifiers.done()
    sign = 1 << WIDTHS[kind.removesuffix("x2")] - 1
    mask = _repeated(sign if keep_sign else sign - 1, kind)
    if kind == "f32" and ftz:
        return lambda a: canonical(function(flush_single(a.view(_F32)).view(_U32), mask[len(a)]).view(_F32))
    if kind == "f32":
        return lambda a: canonical(function(a, mask[len(a)]).view(_F32))
    if not ftz:
        infinity = np.uint16(0x7C00 if kind.startswith("f16") else 0x7F80)
        return _signed(function, mask) if kind == "f64" else _canonical_halves(function, mask, infinity)
    if not kind.startswith("f16"):
        raise UnsupportedInstruction(i, f"modifier ftz does not go with {kind}")
    return lambda a: function(
        encode(flush(decode(a.view(_U16), "f16"), "f16"), "f16").view(a.dtype), mask[len(a)]
    )


def _signed(function: np.ufunc, mask: Spread) -> Function:
    return lambda a: function(a, mask[len(a)])


def _canonical_halves(function: np.ufunc, mask: Spread, infinity: np.uint16) -> Function:
    """The same on f16 and bf16, one or two: a NaN becomes the canonical one, as on an H200."""

    def compute(a: Array) -> Array:
        result: Array = function(a, mask[len(a)]).view(_U16)
        nan = (result & np.uint16(0x7FFF)) > infinity
        if 1 in nan.tobytes():
            result = np.where(nan, np.uint16(0x7FFF), result)
        return result.view(a.dtype)

    return compute


@pure("abs", kinds=FLOATING)
def absolute(i: Instruction) -> Function:
    """Floating-point abs: the sign bit cleared; .ftz flushes subnormal values first."""
    return _sign_operation(i, np.bitwise_and, keep_sign=False)


@pure("neg", kinds=FLOATING)
def neg(i: Instruction) -> Function:
    """Floating-point neg: the sign bit inverted; .ftz flushes subnormal values first."""
    return _sign_operation(i, np.bitwise_xor, keep_sign=True)


_ZEROS: Final = {kind: Spread(0, kind) for kind in (_F32, _F64)}


def _ordered(function: np.ufunc, *, largest: bool) -> Core:
    """Minimum or maximum with -0 < +0, which the ufunc leaves open."""

    def choose(a: Array, b: Array) -> Array:
        result: Array = function(a, b)
        if 1 in (result == _ZEROS[result.dtype][len(result)]).tobytes():
            both = (a == 0) & (b == 0)
            result = np.where(both, a + b if largest else -(-a - b), result)
        return result

    return choose


def _extreme(i: Instruction, *, largest: bool) -> Function:
    count = operand_count(i, 3, 4)
    modifiers = Modifiers(i)
    kind = modifiers.one_of(*(FLOATING - {"f32x2"}))
    ftz, propagate = modifiers.flag("ftz"), modifiers.flag("NaN")
    signed = modifiers.flag("xorsign")
    if signed or (count == 4 and "abs" in i.modifiers):
        modifiers.one_of("abs")
    modifiers.done()
    magnitudes = "abs" in i.modifiers
    if count == 4 and kind != "f32":
        raise UnsupportedInstruction(i, f"three sources with type {kind}")
    ufuncs = (np.maximum, np.fmax) if largest else (np.minimum, np.fmin)
    pair = _ordered(ufuncs[0 if propagate else 1], largest=largest)

    def core(*sources: Array) -> Array:
        values = [np.abs(source) for source in sources] if magnitudes else sources
        result = pair(values[0], values[1])
        for value in values[2:]:
            result = pair(result, value)
        if signed:
            sign = np.signbit(sources[0]) ^ np.signbit(sources[1])
            result = np.where(sign, -result, result)
        return result

    chosen = core if magnitudes or count == 4 else pair
    if kind == "f32":
        return single(chosen, kind, count=count - 1, ftz=ftz)
    if kind == "f64":
        return lambda a, b: chosen(a.view(_F64), b.view(_F64)).view(_U64)
    return half(chosen, kind, ftz=ftz, sat=False, relu=False)


@pure("min", kinds=FLOATING)
def minimum(i: Instruction) -> Function:
    """Floating-point min: of a NaN and a number the number, with .NaN the NaN; "+0.0 > -0.0".

    .xorsign.abs: the smaller magnitude, with the exclusive or of the signs. Up to three sources for float32.
    """
    return _extreme(i, largest=False)


@pure("max", kinds=FLOATING)
def maximum(i: Instruction) -> Function:
    """Floating-point max: as min, the larger one."""
    return _extreme(i, largest=True)


_TESTS: Final[dict[str, Callable[[Array], Array]]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: x == x,
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= np.finfo(x.dtype).tiny) | (x == 0)),
    "subnormal": lambda x: (np.abs(x) < np.finfo(x.dtype).tiny) & (x != 0),
}


@pure("testp")
def testp(i: Instruction) -> Function:
    """Floating-point testp: whether a is of a class of numbers; zeros are normal."""
    operand_count(i, 2)
    modifiers = Modifiers(i)
    test = _TESTS[modifiers.one_of(*_TESTS)]
    inside = _F32 if modifiers.one_of("f32", "f64") == "f32" else _F64
    modifiers.done()
    return lambda a: test(a.view(inside))


@pure("copysign")
def copysign(i: Instruction) -> Function:
    """Floating-point copysign: b with the sign bit of a."""
    operand_count(i, 3)
    modifiers = Modifiers(i)
    kind = modifiers.one_of("f32", "f64")
    modifiers.done()
    top = 1 << WIDTHS[kind] - 1
    sign, rest = _repeated(top, kind), _repeated(top - 1, kind)
    return lambda a, b: (a & sign[len(a)]) | (b & rest[len(b)])
