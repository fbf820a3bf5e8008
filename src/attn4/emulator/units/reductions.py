"""What `red`, `cp.reduce.async.bulk` and `cp.reduce.async.bulk.tensor` do to an element (PTX 9.7.9.25).

``reduction(operation, element)(old, new)`` takes and gives the raw bits of the elements, unsigned arrays of
their size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attn4.emulator.faults import EmulationError
from attn4.emulator.units.formats import bf16_to_f32, f32_to_bf16, f32_to_f16, flush_subnormals

Bits = npt.NDArray[Any]
Combine = Callable[[Bits, Bits], Bits]

WORDS = {
    "u8": "u1", "u16": "u2", "u32": "u4", "s32": "u4", "u64": "u8", "s64": "u8", "b32": "u4", "b64": "u8",
    "f16": "u2", "bf16": "u2", "f32": "u4", "f32.ftz": "u4", "f64": "u8",
}  # fmt: skip
_SIGNED: dict[str, type[np.signedinteger[Any]]] = {"s32": np.int32, "s64": np.int64}
_BITWISE: dict[str, Combine] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_ORDERED: dict[str, Combine] = {"min": np.minimum, "max": np.maximum}


@lru_cache(maxsize=64)
def reduction(operation: str, element: str) -> Combine:
    """The function of an operation on an element type. Raises EmulationError for what PTX does not have."""
    signed = _SIGNED.get(element)
    unsigned = element in ("u32", "u64", "b32", "b64") or signed is not None
    if operation in _BITWISE and unsigned:
        return _BITWISE[operation]
    if operation == "add" and unsigned:
        return np.add
    if operation in _ORDERED and unsigned:
        return _ordered(_ORDERED[operation], signed)
    if operation in ("inc", "dec") and element == "u32":
        return _increment if operation == "inc" else _decrement
    if operation == "add" and element in _ADD:
        return _ADD[element]
    if operation in _ORDERED and element in ("f16", "bf16"):
        return _ordered_half(_ORDERED[operation], element)
    raise EmulationError(f"a reduction .{operation} of elements {element} does not exist")


def _ordered(order: Combine, signed: type[np.signedinteger[Any]] | None) -> Combine:
    if signed is None:
        return order
    return lambda old, new: order(old.view(signed), new.view(signed)).view(old.dtype)


def _ordered_half(order: Combine, element: str) -> Combine:
    """Minimum or maximum of half-precision values; a NaN loses against a number."""
    pick = np.fmin if order is np.minimum else np.fmax
    if element == "f16":
        return lambda old, new: pick(old.view(np.float16), new.view(np.float16)).view(np.uint16)
    return lambda old, new: f32_to_bf16(pick(bf16_to_f32(old), bf16_to_f32(new)))


def _add_f32(old: Bits, new: Bits) -> Bits:
    """`add.f32` flushes subnormal inputs and results to sign-preserving zero."""
    left, right = (flush_subnormals(bits.view(np.float32)) for bits in (old, new))
    return _bits(flush_subnormals(left + right))


def _add_f32_exactly(old: Bits, new: Bits) -> Bits:
    """Into a tensor of elements f32 an H200 adds subnormal values, too; f32.ftz flushes them."""
    return _bits(old.view(np.float32) + new.view(np.float32))


def _bits(values: Any) -> Bits:
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.view(np.uint32))


def _add_f16(old: Bits, new: Bits) -> Bits:
    # The float32 sum of two float16 is exact, so it is rounded once.
    return f32_to_f16(old.view(np.float16).astype(np.float32) + new.view(np.float16).astype(np.float32))


def _add_bf16(old: Bits, new: Bits) -> Bits:
    # Significands of 8 bits: a float32 sum that is inexact lies far from any tie of bfloat16.
    return f32_to_bf16(bf16_to_f32(old) + bf16_to_f32(new))


def _add_f64(old: Bits, new: Bits) -> Bits:
    return (old.view(np.float64) + new.view(np.float64)).view(np.uint64)


_ADD: dict[str, Combine] = {
    "f32": _add_f32,
    "f32.ftz": _add_f32,
    "f32 of tensor": _add_f32_exactly,
    "f16": _add_f16,
    "bf16": _add_bf16,
    "f64": _add_f64,
}


def _increment(old: Bits, new: Bits) -> Bits:
    return np.where(old >= new, np.uint32(0), old + np.uint32(1))


def _decrement(old: Bits, new: Bits) -> Bits:
    return np.where((old == 0) | (old > new), new, old - np.uint32(1))
