"""Bit fields, and counting and finding bits (PTX "Integer Arithmetic": popc, clz, bfind, ...)."""

from __future__ import annotations

from typing import Final

import numpy as np

from attn4.emulator.isa.integer import lane_type, register_type
from attn4.emulator.isa.logic import typed
from attn4.emulator.isa.registry import WIDTHS, Array, Function, Modifiers, Spread, operand_count, pure
from attn4.emulator.ptx.module import Immediate, Instruction

_U8: Final = np.dtype(np.uint8)
_U32: Final = np.dtype(np.uint32)
_U64: Final = np.dtype(np.uint64)


def _field(position: Array, length: Array, kind: str, read: int = 0xFF) -> tuple[Array, Array]:
    """Position and length of a bit field, the bits that are read clamped to the width, as the element
    type.
    """
    inside = lane_type(kind)
    low, limit = np.uint32(read), np.uint32(WIDTHS[kind])
    return (
        np.minimum(position & low, limit).astype(inside),
        np.minimum(length & low, limit).astype(inside),
    )


@pure("bfe", types=("T", "u32", "u32"))
def bfe(i: Instruction) -> Function:
    """Integer bfe: the field of a at b, c bits long, extended by zeros or by bit min(b + c - 1, msb)."""
    kind = typed(i, 4, "u32", "u64", "s32", "s64")
    inside, outside = lane_type(kind), register_type(kind)
    width = inside.type(WIDTHS[kind])
    # PTX leaves values beyond 255 open. Of 32 bits an H200 reads the low byte, of 64 the whole register.
    read = 0xFF if WIDTHS[kind] == 32 else 0xFFFFFFFF
    if isinstance(i.operands[2], Immediate) and isinstance(i.operands[3], Immediate):
        at, bits = (min(operand.bits(32) & read, WIDTHS[kind]) for operand in (i.operands[2], i.operands[3]))
        right, unused = Spread(at, inside), Spread(WIDTHS[kind] - bits, inside)

        def fixed(a: Array, _: Array, __: Array) -> Array:
            rest = unused[len(a)]
            field: Array = (a.view(inside) >> right[len(a)]) << rest >> rest
            return field.view(outside)

        if bits > 0:
            return fixed

    def extract(a: Array, b: Array, c: Array) -> Array:
        position, length = _field(b, c, kind, read)
        unused = width - length
        field: Array = (a.view(inside) >> position) << unused >> unused
        return np.where(length == 0, inside.type(0), field).view(outside)

    return extract


@pure("bfi", types=("T", "T", "u32", "u32"))
def bfi(i: Instruction) -> Function:
    """Integer bfi: b, in which the d bits at bit c are replaced by the low d bits of a."""
    kind = typed(i, 5, "b32", "b64")
    register = register_type(kind)
    width = register.type(WIDTHS[kind])
    ones = np.array([-1], f"i{register.itemsize}").view(register)

    def insert(a: Array, b: Array, c: Array, d: Array) -> Array:
        position, length = _field(c, d, kind)
        mask = (ones >> (width - length)) << position
        merged: Array = (b & ~mask) | ((a << position) & mask)
        return merged

    return insert


@pure("bmsk", types=("u32",))
def bmsk(i: Instruction) -> Function:
    """Integer bmsk: b one bits at bit a; .clamp limits both to 32, .wrap takes them modulo 32."""
    operand_count(i, 3)
    modifiers = Modifiers(i)
    clamp = modifiers.one_of("clamp", "wrap") == "clamp"
    modifiers.one_of("b32")
    modifiers.done()

    def make(a: Array, b: Array) -> Array:
        limit = np.uint32(32 if clamp else 31)
        position, length = (np.minimum(x, limit) if clamp else x & limit for x in (a, b))
        return ((np.uint64(1) << length.astype(_U64)) - np.uint64(1) << position.astype(_U64)).astype(_U32)

    return make


@pure("popc")
def popc(i: Instruction) -> Function:
    """Integer popc: the number of one bits, as .u32."""
    typed(i, 2, "b32", "b64")
    return lambda a: np.bitwise_count(a).astype(_U32)


def highest_bit(a: Array) -> Array:
    """Position of the most significant one bit of unsigned integers, -1 where there is none; int32."""
    if a.dtype.itemsize < 8:
        return np.frexp(a.astype(np.float64))[1] - np.int32(1)
    high = (a >> np.uint64(32)).astype(_U32)
    return np.where(high != 0, highest_bit(high) + np.int32(32), highest_bit(a.astype(_U32)))


@pure("clz")
def clz(i: Instruction) -> Function:
    """Integer clz: the number of zeros above the most significant one bit, as .u32; the width for 0."""
    top = np.int32(WIDTHS[typed(i, 2, "b32", "b64")] - 1)
    return lambda a: (top - highest_bit(a)).view(_U32)


@pure("bfind")
def bfind(i: Instruction) -> Function:
    """Integer bfind: the position of the most significant non-sign bit, 0xffffffff without one;
    .shiftamt: how far to shift left to bring it to the top.
    """
    operand_count(i, 2)
    modifiers = Modifiers(i)
    amount = modifiers.flag("shiftamt")
    kind = modifiers.one_of("u32", "u64", "s32", "s64")
    modifiers.done()
    inside, top = lane_type(kind), np.int32(WIDTHS[kind] - 1)

    def find(a: Array) -> Array:
        if kind[0] == "s":
            signed = a.view(inside)
            a = (signed ^ (signed >> inside.type(top))).view(a.dtype)
        position = highest_bit(a)
        if amount:
            position = np.where(position < 0, position, top - position)
        return position.view(_U32)

    return find


_REVERSED: Final = np.array([int(f"{n:08b}"[::-1], 2) for n in range(256)], np.uint8)


@pure("brev")
def brev(i: Instruction) -> Function:
    """Integer brev: bit n of d is bit N - 1 - n of a."""
    register = register_type(typed(i, 2, "b32", "b64"))
    return lambda a: _REVERSED[a.view(_U8)].view(register).byteswap()


@pure("fns", types=("b32", "u32", "s32"))
def fns(i: Instruction) -> Function:
    """Integer fns: the position of the offset-th one bit of mask from bit base; else 0xffffffff."""
    typed(i, 4, "b32")

    def find(mask: Array, base: Array, offset: Array) -> Array:
        lanes = zip(mask.tolist(), base.tolist(), offset.tolist(), strict=True)
        return np.array([_nth_set(*lane) for lane in lanes], _U32)

    return find


def _nth_set(mask: int, base: int, offset: int) -> int:
    steps = offset - (offset >> 31 << 32)
    if steps == 0:
        return base if base < 32 and mask >> base & 1 else 0xFFFFFFFF
    order = range(base, 32) if steps > 0 else range(min(base, 31), -1, -1)
    found = [bit for bit in order if mask >> bit & 1]
    return found[abs(steps) - 1] if abs(steps) <= len(found) else 0xFFFFFFFF


@pure("szext", types=("T", "u32"))
def szext(i: Instruction) -> Function:
    """Integer szext: the lower b bits of a, extended by their sign or by zeros to 32 bits.

    .clamp: more than 32 bits are 32; .wrap: b modulo 32.
    """
    operand_count(i, 3)
    modifiers = Modifiers(i)
    clamp = modifiers.one_of("clamp", "wrap") == "clamp"
    signed = modifiers.one_of("u32", "s32") == "s32"
    modifiers.done()
    element = np.int64 if signed else np.uint64

    def extend(a: Array, b: Array) -> Array:
        bits = np.minimum(b, np.uint32(32)) if clamp else b & np.uint32(31)
        unused = (np.uint64(64) - bits).astype(element)
        wide = (a.astype(np.uint64) << unused.astype(np.uint64)).view(element) >> unused
        return np.where(bits == 0, element(0), wide).astype(np.uint32)

    return extend
