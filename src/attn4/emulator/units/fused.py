"""The sum of one step of a product as the tensor core of an H200 makes it, bit for bit.

    with as_on_chip():                 # slower: by default `dot` sums in float64
        bits = fused_step(a, "bf16", b, "bf16", accumulators, "f32")

Found with tests/recorded: all K products and the addend are aligned to the largest exponent among them (that
of a product is the sum of its operands' exponents, not normalised); what lies more than 25 bits below it (13
for 8-bit formats) is cut off; the sum of the rest is exact. A float32 result is that sum cut at 23 bits of
fraction (13 for 8-bit formats), a float16 result the sum rounded to nearest even.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from attn4.emulator.units.formats import FORMATS, f32_to_f16

Words = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Exponents = npt.NDArray[np.int32]

_LEAST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "f32": -126}
_ALIGNED = {"f16": 25, "bf16": 25, "tf32": 25, "e4m3": 13, "e5m2": 13}
_FRACTION = 23
_NOTHING = -4096  # the exponent of zero
_CANONICAL = np.uint32(0x7FFFFFFF)

_chip = [False]


@contextmanager
def as_on_chip(on: bool = True) -> Iterator[None]:
    """Let the products of warpgroups in this process be summed as the chip sums them."""
    before, _chip[0] = _chip[0], on
    try:
        yield
    finally:
        _chip[0] = before


def on_chip() -> bool:
    """Whether products are to be summed as on the chip."""
    return _chip[0]


def fused_step(
    a: Words, a_format: str, b: Words, b_format: str, addend: npt.NDArray[Any] | None, d: str, *, negate: bool
) -> Words:
    """Bits of A B^T + addend of words A (M, K) and B (N, K): uint32 (M, N), or uint16 where ``d`` is "f16".

    ``addend`` holds values of ``d``, (M, N), or is None; ``negate`` changes the sign of the products.
    """
    # K outermost: operations on (M, N), which stay in the cache, are six times faster than on (M, N, K).
    left = np.ascontiguousarray(FORMATS[a_format].decode(a).astype(np.float64).T)[:, :, None]
    right = np.ascontiguousarray(FORMATS[b_format].decode(b).astype(np.float64).T)[:, None, :]
    added = None if addend is None else addend.astype(np.float64)
    largest = np.full((len(a), len(b)), 2 * _NOTHING, np.int32) if added is None else _exponents(added, d)
    for first, second in zip(_exponents(left, a_format), _exponents(right, b_format), strict=True):
        np.maximum(largest, first + second, out=largest)
    if negate:
        left = -left
    bits = _ALIGNED[a_format]
    shift = bits - np.maximum(largest, -600)
    scale = np.ldexp(1.0, shift)
    total = np.zeros_like(scale) if added is None else np.trunc(added * scale)
    product = np.empty_like(scale)
    for first, second in zip(left, right, strict=True):
        np.multiply(first, second, out=product)
        np.multiply(product, scale, out=product)
        total += np.trunc(product, out=product)
    value = np.ldexp(total, -shift)
    finite = np.isfinite(value)
    if not finite.all():
        value = np.where(finite, value, _special(left, right, added))
    if d == "f16":
        return f32_to_f16(_odd(value))
    return _cut(value, bits)


def _exponents(values: Doubles, kind: str) -> Exponents:
    """The exponent that each value is stored with: of subnormal ones the least, of zero `_NOTHING`."""
    exponent = np.maximum(np.frexp(values)[1] - 1, _LEAST[kind])
    return np.where(values == 0, _NOTHING, exponent).astype(np.int32)


def _special(left: Doubles, right: Doubles, added: Doubles | None) -> Doubles:
    """What infinities and NaN give."""
    total = np.zeros((left.shape[1], right.shape[2])) if added is None else added
    for first, second in zip(left, right, strict=True):
        total = total + first * second
    return total


def _cut(value: Doubles, bits: int) -> npt.NDArray[np.uint32]:
    """float32 bits, cut off towards zero; 8-bit formats leave 13 bits of fraction."""
    single = value.astype(np.float32)
    away = (np.abs(single.astype(np.float64)) > np.abs(value)) & np.isfinite(single)
    single = np.where(away, np.nextafter(single, np.float32(0)), single)
    words = single.view(np.uint32)
    if bits < _FRACTION:
        words = words & np.uint32(0xFFFFFFFF << _FRACTION - bits & 0xFFFFFFFF)
    return np.where(np.isnan(single), _CANONICAL, words)


def _odd(value: Doubles) -> npt.NDArray[np.float32]:
    """float32 rounded to odd, so that a later rounding to nearest float16 is that of the value."""
    single = value.astype(np.float32)
    words = single.view(np.uint32).copy()
    wide = single.astype(np.float64)
    away = np.abs(wide) > np.abs(value)
    words -= away.astype(np.uint32)
    inexact = (wide != value) & np.isfinite(value)
    words |= inexact.astype(np.uint32)
    return words.view(np.float32)
