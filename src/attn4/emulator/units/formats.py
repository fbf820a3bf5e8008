"""Number formats of the tensor core and of reductions, to and from bits.

``FORMATS[name].decode(bits)`` gives exact float32 values of an unsigned array; ``FORMATS[name].bytes`` is the
size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


def bf16_to_f32(bits: Array) -> Floats:
    """Exact: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: Array) -> npt.NDArray[np.uint16]:
    """Round to nearest even; NaN becomes 0x7fff, as `cvt.rn.bf16.f32` gives it."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def f32_to_f16(values: Array) -> npt.NDArray[np.uint16]:
    """Round to nearest even, to infinity past 65504; NaN becomes 0x7fff."""
    with np.errstate(over="ignore"):
        bits = np.asarray(values, np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def flush_subnormals(values: Floats) -> Floats:
    """Subnormal float32 values become zero of the same sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def _table(exponent: int, mantissa: int, *, infinities: bool) -> Floats:
    """Values of the 256 bit patterns of an 8-bit float; without infinities only all-ones is NaN (e4m3)."""
    codes = np.arange(256)
    e, m = (codes >> mantissa) & (2**exponent - 1), codes & (2**mantissa - 1)
    lowest = 2 - 2 ** (exponent - 1) - mantissa  # exponent of the smallest subnormal
    value = np.where(e == 0, m * 2.0**lowest, (2**mantissa + m) * 2.0 ** (e - 1 + lowest))
    if infinities:
        value = np.where(e == 2**exponent - 1, np.where(m == 0, np.inf, np.nan), value)
    else:
        value = np.where(codes & 127 == 127, np.nan, value)
    return np.where(codes & 128, -value, value).astype(np.float32)


_E4M3 = _table(4, 3, infinities=False)
_E5M2 = _table(5, 2, infinities=True)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of matrix elements: its size, and how unsigned words of that size become float32."""

    name: str
    bytes: int
    decode: Callable[[Array], Floats]


def _small(exponent: int, mantissa: int) -> Floats:
    """Values of the bit patterns of a float of 4 or 6 bits: no infinities, no NaN."""
    bits = 1 + exponent + mantissa
    codes = np.arange(1 << bits)
    e, m = codes >> mantissa & (1 << exponent) - 1, codes & (1 << mantissa) - 1
    lowest = 2 - 2 ** (exponent - 1) - mantissa
    value = np.where(e == 0, m * 2.0**lowest, (2**mantissa + m) * 2.0 ** (e - 1 + lowest))
    values: Floats = np.where(codes >> bits - 1, -value, value).astype(np.float32)
    return values


_E2M1, _E2M3, _E3M2 = _small(2, 1), _small(2, 3), _small(3, 2)


def _nibbles(octets: Array) -> Array:
    """The 4-bit parts of bytes along the last axis, the lower one first."""
    pairs: Array = np.stack((octets & np.uint8(15), octets >> np.uint8(4)), axis=-1)
    return pairs.reshape(*octets.shape[:-1], -1)


def _padded4(octets: Array) -> Floats:
    """Of each 16 bytes the first 8 hold 16 elements of 4 bits (PTX 9.7.16.10.3, .b4x16_p64)."""
    chunks = np.ascontiguousarray(octets).reshape(*octets.shape[:-1], -1, 16)
    values: Floats = _E2M1.take(_nibbles(chunks[..., :8])).reshape(octets.shape)
    return values


def _padded6(table: Floats) -> Callable[[Array], Floats]:
    """Of each 16 bytes the first 12 hold 16 elements of 6 bits, the lowest bits first (.b6x16_p32)."""

    def decode(octets: Array) -> Floats:
        triples = np.ascontiguousarray(octets).reshape(*octets.shape[:-1], -1, 16)[..., :12]
        parts = triples.reshape(*triples.shape[:-1], 4, 3).astype(np.uint32)
        words = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16
        codes = np.stack([words >> shift & 63 for shift in (0, 6, 12, 18)], axis=-1)
        values: Floats = table.take(codes).reshape(octets.shape)
        return values

    return decode


def _powers(octets: Array) -> Floats:
    """ue8m0: powers of two, 255 is NaN."""
    exponent = octets.astype(np.int32) - 127
    return np.where(octets == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponent)).astype(np.float32)


_TF32_BITS = np.uint32(0xFFFFE000)  # the tensor core reads the upper 19 bits of a tf32 operand

FORMATS = {
    entry.name: entry
    for entry in (
        Format("f16", 2, lambda bits: bits.view(np.float16).astype(np.float32)),
        Format("bf16", 2, bf16_to_f32),
        Format("tf32", 4, lambda bits: (bits & _TF32_BITS).view(np.float32)),
        Format("e4m3", 1, _E4M3.take),
        Format("e5m2", 1, _E5M2.take),
        Format("e2m1", 1, _padded4),
        Format("e2m3", 1, _padded6(_E2M3)),
        Format("e3m2", 1, _padded6(_E3M2)),
        Format("e2m1 packed", 1, lambda octets: _E2M1.take(_nibbles(np.ascontiguousarray(octets)))),
        Format("ue8m0", 1, _powers),
        Format("ue4m3", 1, lambda octets: _E4M3.take(octets & np.uint8(0x7F))),
        Format("s8", 1, lambda bits: bits.view(np.int8).astype(np.float32)),
        Format("u8", 1, lambda bits: bits.astype(np.float32)),
    )
}
INTEGERS = frozenset({"s8", "u8"})
