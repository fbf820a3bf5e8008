"""Products of parts of registers (PTX 9.7.1): 24-bit products, and dot products of two and four parts."""

from __future__ import annotations

from typing import Final

import numpy as np

from attn4.emulator.isa.registry import (
    Array,
    Function,
    Modifiers,
    UnsupportedInstruction,
    operand_count,
    pure,
)
from attn4.emulator.ptx.module import Instruction

_I32: Final = np.dtype(np.int32)
_I64: Final = np.dtype(np.int64)
_U32: Final = np.dtype(np.uint32)


def _low(a: Array, kind: str) -> Array:
    """The lower 24 bits as 64-bit integers."""
    if kind == "u32":
        return (a & np.uint32(0xFFFFFF)).astype(_I64)
    return (a.view(_I32) << np.int32(8) >> np.int32(8)).astype(_I64)


def _product(i: Instruction, operands: int, *allowed: str) -> tuple[str, bool, Function]:
    """The type, whether .sat is set, and the function of a and b: 32 bits of the 48-bit product."""
    operand_count(i, operands)
    modifiers = Modifiers(i)
    high = modifiers.one_of("hi", "lo") == "hi"
    kind = modifiers.one_of("u32", "s32")
    saturate = "sat" in allowed and high and kind == "s32" and modifiers.flag("sat")
    modifiers.done()

    def multiply(a: Array, b: Array) -> Array:
        product = _low(a, kind) * _low(b, kind)
        return product >> np.int64(16) if high else product

    return kind, saturate, multiply


@pure("mul24", types=("T", "T"))
def mul24(i: Instruction) -> Function:
    """Integer mul24: the product of the lower 24 bits of a and b; .hi its bits 16-47, .lo its bits 0-31."""
    _, _, multiply = _product(i, 3)
    return lambda a, b: multiply(a, b).astype(_U32)


@pure("mad24", types=("T", "T", "T"))
def mad24(i: Instruction) -> Function:
    """Integer mad24: mul24 plus c; .hi.sat.s32 clamps to 32 bits."""
    _, saturate, multiply = _product(i, 4, "sat")

    def compute(a: Array, b: Array, c: Array) -> Array:
        part: Array = multiply(a, b).astype(_U32)
        if not saturate:
            return part + c
        total = part.view(_I32).astype(_I64) + c.view(_I32)
        clamped: Array = np.clip(total, -(2**31), 2**31 - 1).astype(_I32).view(_U32)
        return clamped

    return compute


@pure("dp4a", types=("b32",))
def dp4a(i: Instruction) -> Function:
    """Integer dp4a: d = c + the sum of the four products of the bytes of a and b, each signed or unsigned."""
    operand_count(i, 4)
    if len(i.modifiers) != 2 or not {*i.modifiers} <= {"s32", "u32"}:
        raise UnsupportedInstruction(i, "two types, each s32 or u32, are needed")
    a_type, b_type = (np.int8 if kind == "s32" else np.uint8 for kind in i.modifiers)

    def dot(a: Array, b: Array, c: Array) -> Array:
        products = a.view(a_type).astype(np.int32) * b.view(b_type).astype(np.int32)
        total: Array = products.reshape(-1, 4).sum(1, dtype=np.int32)
        return total.view(_U32) + c

    return dot


@pure("dp2a", types=("b32",))
def dp2a(i: Instruction) -> Function:
    """Integer dp2a: d = c + the sum of the two products of the halves of a and two bytes of b: .lo or .hi."""
    operand_count(i, 4)
    half, *kinds = i.modifiers or ("",)
    if half not in ("lo", "hi") or len(kinds) != 2 or not {*kinds} <= {"s32", "u32"}:
        raise UnsupportedInstruction(i, "the form is dp2a.lo or .hi, and two types, each s32 or u32")
    a_type = np.int16 if kinds[0] == "s32" else np.uint16
    b_type = np.int8 if kinds[1] == "s32" else np.uint8
    chosen = slice(0, 2) if half == "lo" else slice(2, 4)

    def dot(a: Array, b: Array, c: Array) -> Array:
        left = a.view(a_type).astype(_I64).reshape(-1, 2)
        right = b.view(b_type).astype(_I64).reshape(-1, 4)[:, chosen]
        total: Array = (left * right).sum(1).astype(_U32) + c
        return total

    return dot
