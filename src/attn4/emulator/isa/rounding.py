"""Rounding done once: exact sums and products in double precision, and their way into narrower formats.

numpy has no fused multiply-add and rounds to nearest only. A product of two float32 is exact in float64; a
sum is `odd_sum`, rounded to odd, which keeps what any later rounding to at most 51 bits needs to know (Boldo
and Melquiond, "Emulation of FMA and correctly rounded sums", 2008). `narrow` is that later rounding, in any
of PTX's modes. For float64 results, lanes are computed one by one with rational numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from attn4.emulator.isa.registry import Array, Spread

_F16: Final = np.dtype(np.float16)
_F32: Final = np.dtype(np.float32)
_F64: Final = np.dtype(np.float64)
_U16: Final = np.dtype(np.uint16)
_U32: Final = np.dtype(np.uint32)
_U64: Final = np.dtype(np.uint64)
_ONE: Final = Spread(1, _U64)
_ZERO: Final = Spread(0, _F64)
_ZERO_BITS: Final = Spread(0, _U64)
_INFINITY: Final = np.array([np.inf])
_ZERO_SINGLE: Final = Spread(0, _F32)
_NAN32: Final = np.array([0x7FFFFFFF], _U32)
_NAN32_VALUE: Final = _NAN32.view(_F32)


@dataclass(frozen=True, slots=True)
class Format:
    """A binary format: bits of the fraction, the least normal exponent, the greatest finite value, NaN."""

    fraction: int
    least: int
    greatest: float
    nan: int


FORMATS: Final = {
    "f64": Format(52, -1022, float(np.finfo(np.float64).max), 0x7FFFFFFFFFFFFFFF),
    "f32": Format(23, -126, float(np.finfo(np.float32).max), 0x7FFFFFFF),
    "tf32": Format(10, -126, (2 - 2**-10) * 2.0**127, 0x7FFFE000),
    "f16": Format(10, -14, 65504.0, 0x7FFF),
    "bf16": Format(7, -126, (2 - 2**-7) * 2.0**127, 0x7FFF),
    "e4m3": Format(3, -6, 448.0, 0x7F),
    "e5m2": Format(2, -14, 57344.0, 0x7F),
}
"""PTX formats; e4m3 has no infinity."""


def _half_away(x: Array) -> Array:
    rounded: Array = np.trunc(x + np.copysign(0.5, x))
    return rounded


TO_INTEGRAL: Final[dict[str, Callable[[Array], Array]]] = {
    "rn": np.rint,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
    "rna": _half_away,
}
"""Rounding of a float array to integral values, by mode."""


def odd_sum(a: Array, b: Array) -> Array:
    """Sum of float64, rounded to odd: exact, or the neighbour whose last bit is set."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    count = len(total)
    inexact = np.abs(error) > _ZERO[count]
    if 1 not in inexact.tobytes():
        return total
    step = inexact & ((total.view(_U64) & _ONE[count]) == _ZERO_BITS[count])
    return np.where(step, np.nextafter(total, np.copysign(_INFINITY, error)), total)


def signed_zero(result: Array, a: Array, b: Array) -> Array:
    """Sum `result` of a and b in mode rm: "-0" where it is zero, unless both are +0 (IEEE 754, 6.3)."""
    zero = result == (_ZERO if result.dtype == _F64 else _ZERO_SINGLE)[len(result)]
    if 1 not in zero.tobytes():
        return result
    negative = zero & (np.signbit(a) | np.signbit(b))
    return np.where(negative, -np.zeros(1, result.dtype), result)


def to_single(x: Array, mode: str) -> Array:
    """float64 -> float32 in mode rn, rz, rm or rp."""
    nearest = x.astype(_F32)
    if mode == "rn":
        return nearest
    back = nearest.astype(_F64)
    if mode == "rz":
        wrong = np.abs(back) > np.abs(x)
        towards = np.zeros(1, _F32)
    elif mode == "rm":
        wrong = back > x
        towards = np.array([-np.inf], _F32)
    else:
        wrong = back < x
        towards = np.array([np.inf], _F32)
    if 1 in wrong.tobytes():
        nearest = np.where(wrong, np.nextafter(nearest, towards), nearest)
    return nearest


def round_to(x: Array, target: Format, mode: str, *, finite: bool = False) -> Array:
    """float64 values rounded to `target`'s, still in float64; `finite` clamps to the greatest finite one."""
    _, exponent = np.frexp(x)
    quantum = np.maximum(exponent - 1, target.least) - target.fraction
    rounded: Array = np.ldexp(TO_INTEGRAL[mode](np.ldexp(x, -quantum)), quantum)
    over = np.abs(rounded) > target.greatest
    if 1 in over.tobytes():
        rounded = np.where(over, _overflow(x, target.greatest, mode, finite), rounded)
    return rounded


def _overflow(x: Array, greatest: float, mode: str, finite: bool) -> Array:
    """What stands for results beyond the greatest finite value; an infinity stays one unless `finite`."""
    limit = np.copysign(greatest, x)
    if finite:
        return limit
    infinity = np.copysign(np.inf, x)
    if mode in ("rn", "rna"):
        return infinity
    towards_zero = {"rz": x == x, "rm": x > 0, "rp": x < 0}[mode]
    return np.where(np.isfinite(x) & towards_zero, limit, infinity)


_STORED: Final[dict[str, np.dtype[Any]]] = {"f16": _F16, "f32": _F32, "tf32": _F32, "f64": _F64}


def encode(x: Array, kind: str) -> Array:
    """Bits of float64 values that `kind` holds exactly; any NaN becomes the canonical one."""
    if kind in ("f32", "tf32"):
        bits = x.astype(_F32).view(_U32)
    elif kind == "f64":
        return x.view(_U64)
    elif kind == "bf16":
        bits = (x.astype(_F32).view(_U32) >> np.uint32(16)).astype(_U16)
    elif kind == "f16":
        bits = x.astype(_F16).view(_U16)
    else:
        # With the exponent's bias made that of float16, an 8-bit format is the upper part of one.
        half = (np.ldexp(x, -8) if kind == "e4m3" else x).astype(_F16).view(_U16)
        sign = (half >> np.uint16(8)) & np.uint16(0x80)
        rest = (half >> np.uint16(7 if kind == "e4m3" else 8)) & np.uint16(0x7F)
        bits = (sign | rest).astype(np.uint8)
    nan = np.isnan(x)
    if 1 in nan.tobytes():
        bits = np.where(nan, bits.dtype.type(FORMATS[kind].nan), bits)
    return bits


def decode(bits: Array, kind: str) -> Array:
    """float64 values of a 16-, 32- or 64-bit format's bits; exact."""
    if kind == "bf16":
        return (bits.astype(_U32) << np.uint32(16)).view(_F32).astype(_F64)
    return bits.view(_STORED[kind]).astype(_F64)


def directed_sum(mode: str) -> Callable[[Array, Array], Array]:
    """Sum of float32 in mode rz, rm or rp: the nearest, corrected where its error is on the wrong side."""
    towards = Spread({"rz": 0.0, "rm": -np.inf, "rp": np.inf}[mode], _F32)

    def add(a: Array, b: Array) -> Array:
        total = a + b
        part = total - a
        error = (a - (total - part)) + (b - part)
        if not error.dot(error) < np.inf:
            return to_single(odd_sum(a.astype(_F64), b.astype(_F64)), mode)
        count = len(total)
        zero = _ZERO_SINGLE[count]
        if mode == "rm":
            wrong = error < zero
        elif mode == "rp":
            wrong = error > zero
        else:
            wrong = (error != zero) & (np.signbit(error) != np.signbit(total))
        if 1 in wrong.tobytes():
            total = np.where(wrong, np.nextafter(total, towards[count]), total)
        return total

    return add


def narrow(x: Array, kind: str, mode: str = "rn", *, finite: bool = False) -> Array:
    """float64 values rounded to the bits of `kind`."""
    return encode(round_to(x, FORMATS[kind], mode, finite=finite), kind)


def flush(x: Array, kind: str) -> Array:
    """float64 values with the subnormal ones of `kind` made zero of the same sign."""
    return np.where(np.abs(x) < 2.0 ** FORMATS[kind].least, np.copysign(0.0, x), x)


_TINY: Final = Spread(2.0**-126, _F32)
_ZERO32: Final = np.zeros(1, _F32)


def flush_single(x: Array) -> Array:
    """float32 values with subnormal ones made zero of the same sign."""
    tiny = np.abs(x) < _TINY[len(x)]
    return np.where(tiny, np.copysign(_ZERO32, x), x) if 1 in tiny.tobytes() else x


def canonical(x: Array) -> Array:
    """float32 values as bits, every NaN as 0x7fffffff."""
    norm = x.dot(x)
    if norm != norm:
        x = np.where(x == x, x, _NAN32_VALUE)
    return x.view(_U32)


_TIE_MASK: Final = Spread(0x0FFFFFFF, _U64)


def fused_single(a: Array, b: Array, c: Array) -> Array:
    """The float32 a * b + c, rounded once, to nearest even.

    Two roundings differ from one only where the float64 sum is a tie of float32 without being the exact sum;
    the 28 lowest bits of such a sum are zero, for normal and subnormal results alike.
    """
    product = a.astype(_F64) * b.astype(_F64)
    wide = c.astype(_F64)
    total = product + wide
    result = total.astype(_F32)
    count = len(total)
    tie = 1 in ((total.view(_U64) & _TIE_MASK[count]) == _ZERO_BITS[count]).tobytes()
    if tie and 1 in (result.astype(_F64) != total).tobytes():
        result = odd_sum(product, wide).astype(_F32)
    return result


def lanewise(function: Callable[..., float]) -> Callable[..., Array]:
    """`function` of Python floats, applied to each lane of float64 arrays."""

    def apply(*sources: Array) -> Array:
        return np.array([function(*lane) for lane in zip(*(x.tolist() for x in sources), strict=True)], _F64)

    return apply


def fused_double(mode: str) -> Callable[[float, float, float], float]:
    """The float64 a * b + c, rounded once in `mode`."""

    def fused(a: float, b: float, c: float) -> float:
        if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
            return math.nan if math.isnan(a * b) else (a * b if math.isinf(a) or math.isinf(b) else 0.0) + c
        product = Fraction(a) * Fraction(b)
        total = product + Fraction(c)
        if total == 0:
            sign = math.copysign(1, a) * math.copysign(1, b)
            if product == 0 and sign == math.copysign(1, c):
                return math.copysign(0.0, c)
            return -0.0 if mode == "rm" else 0.0
        return round_fraction(total, mode)

    return fused


def divided_double(mode: str) -> Callable[[float, float], float]:
    """The float64 a / b, rounded in `mode`."""

    def divided(a: float, b: float) -> float:
        if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
            with np.errstate(all="ignore"):
                return float(np.float64(a) / np.float64(b))
        return round_fraction(Fraction(a) / Fraction(b), mode)

    return divided


def root_double(mode: str) -> Callable[[float], float]:
    """Square root of float64, rounded in `mode`."""

    def root(a: float) -> float:
        if a < 0:
            return -math.nan
        if not math.isfinite(a) or a == 0:
            return a
        nearest = math.sqrt(a)
        square = Fraction(nearest) ** 2
        if mode in ("rz", "rm") and square > Fraction(a):
            return math.nextafter(nearest, 0.0)
        if mode == "rp" and square < Fraction(a):
            return math.nextafter(nearest, math.inf)
        return nearest

    return root


_TO_INT: Final[dict[str, Callable[[Fraction], int]]] = {
    "rn": round,
    "rz": math.trunc,
    "rm": math.floor,
    "rp": math.ceil,
}


def round_fraction(value: Fraction, mode: str) -> float:
    """A rational number other than zero rounded to float64 in mode rn, rz, rm or rp."""
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -1022) - 52)
    scaled = value / quantum
    integer = _TO_INT[mode](scaled)
    sign = -1.0 if value < 0 else 1.0
    if integer == 0:
        return math.copysign(0.0, sign)
    try:
        return float(integer * quantum)
    except OverflowError:
        away = mode == "rn" or mode == ("rp" if sign > 0 else "rm")
        return math.copysign(math.inf if away else FORMATS["f64"].greatest, sign)
