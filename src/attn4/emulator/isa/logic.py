"""Logic, shifts and byte permutation (PTX "Logic and Shift Instructions"; prmt of "Data Movement").

Untyped bits; shift amounts beyond the width are clamped to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from attn4.emulator.isa.integer import lane_type, register_type
from attn4.emulator.isa.registry import (
    WIDTHS,
    Array,
    Function,
    Modifiers,
    Spread,
    UnsupportedInstruction,
    immediate,
    operand_count,
    pure,
)
from attn4.emulator.ptx.module import Immediate, Instruction, PairDestination

_LOGIC: Final = ("pred", "b16", "b32", "b64")
_U8: Final = np.dtype(np.uint8)
_U16: Final = np.dtype(np.uint16)
_U32: Final = np.dtype(np.uint32)
_U64: Final = np.dtype(np.uint64)


def typed(i: Instruction, operands: int, *kinds: str) -> str:
    """The type of an instruction with so many operands and no other modifier; it must be one of `kinds`."""
    operand_count(i, operands)
    modifiers = Modifiers(i)
    kind = modifiers.one_of(*kinds)
    modifiers.done()
    return kind


@pure("and")
def bitwise_and(i: Instruction) -> Function:
    """Logic and: d = a & b, bit by bit."""
    typed(i, 3, *_LOGIC)
    return np.bitwise_and


@pure("or")
def bitwise_or(i: Instruction) -> Function:
    """Logic or: d = a | b, bit by bit."""
    typed(i, 3, *_LOGIC)
    return np.bitwise_or


@pure("xor")
def bitwise_xor(i: Instruction) -> Function:
    """Logic xor: d = a ^ b, bit by bit."""
    typed(i, 3, *_LOGIC)
    return np.bitwise_xor


@pure("not")
def bitwise_not(i: Instruction) -> Function:
    """Logic not: d = ~a, bit by bit; of a predicate its opposite."""
    typed(i, 2, *_LOGIC)
    return np.invert


@pure("cnot")
def logical_not(i: Instruction) -> Function:
    """Logic cnot: d = (a == 0) ? 1 : 0."""
    register = register_type(typed(i, 2, "b16", "b32", "b64"))
    return lambda a: (a == 0).astype(register)


def _shift(i: Instruction, kind: str, function: np.ufunc) -> Function:
    """Shift by an unsigned 32-bit amount; numpy shifts by the width or more as if clamped to it."""
    inside, outside = lane_type(kind), register_type(kind)
    bits = WIDTHS[kind]
    amount = i.operands[2]
    if isinstance(amount, Immediate):
        fixed = Spread(min(amount.bits(32), bits), inside)
        if inside == outside:
            return lambda a, _: function(a, fixed[len(a)])
        return lambda a, _: function(a.view(inside), fixed[len(a)]).view(outside)
    limit = Spread(bits, _U32)
    if bits == 32:
        return lambda a, b: function(a.view(inside), np.minimum(b, limit[len(b)]).view(inside)).view(outside)
    return lambda a, b: function(a.view(inside), np.minimum(b, limit[len(b)]).astype(inside)).view(outside)


@pure("shl", types=("T", "u32"))
def shl(i: Instruction) -> Function:
    """Shift shl: d = a << b, "Shift amounts greater than the register width N are clamped to N"."""
    return _shift(i, typed(i, 3, "b16", "b32", "b64"), np.left_shift)


@pure("shr", types=("T", "u32"))
def shr(i: Instruction) -> Function:
    """Shift shr: d = a >> b; the sign comes in for signed types, else zeros; amounts as in shl."""
    kind = typed(i, 3, "b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
    return _shift(i, kind, np.right_shift)


@pure("shf", types=("b32", "b32", "u32"))
def shf(i: Instruction) -> Function:
    """Shift shf: d is the upper half of the pair (b, a) shifted left, or the lower half of it shifted right.

    "n = (.mode == .clamp) ? min(c, 32) : c & 0x1f".
    """
    operand_count(i, 4)
    modifiers = Modifiers(i)
    left = modifiers.one_of("l", "r") == "l"
    clamp = modifiers.one_of("clamp", "wrap") == "clamp"
    modifiers.one_of("b32")
    modifiers.done()
    limit = np.array([32 if clamp else 31], _U32)
    combine = np.minimum if clamp else np.bitwise_and
    half = np.array([32], _U64)

    def funnel(a: Array, b: Array, c: Array) -> Array:
        n = combine(c, limit).astype(_U64)
        pair = (b.astype(_U64) << half) | a
        shifted: Array = (pair << n) >> half if left else pair >> n
        return shifted.astype(_U32)

    return funnel


def lookup(table: int) -> Callable[[Array, Array, Array], Array]:
    """The bitwise function of three inputs with the truth table `table`, as exclusive or of products.

    Bit 4a + 2b + c of the table is the result for bits a, b, c; its Moebius transform picks the products.
    """
    terms = [table >> n & 1 for n in range(8)]
    for step in (1, 2, 4):
        for n in range(8):
            if n & step:
                terms[n] ^= terms[n ^ step]

    def evaluate(a: Array, b: Array, c: Array) -> Array:
        result: Array | None = None
        for n in range(1, 8):
            if terms[n]:
                term: Array | None = None
                for bit, source in ((4, a), (2, b), (1, c)):
                    if n & bit:
                        term = source if term is None else term & source
                assert term is not None
                result = term if result is None else result ^ term
        if result is None:
            result = np.zeros_like(a)
        return ~result if terms[0] else result

    return evaluate


_FAST_TABLES: Final[dict[int, Callable[[Array, Array, Array], Array]]] = {
    0xFE: lambda a, b, c: a | b | c,
    0xF8: lambda a, b, c: a | (b & c),
    0xEA: lambda a, b, c: (a & b) | c,
    0xE0: lambda a, b, c: a & (b | c),
    0xA8: lambda a, b, c: (a | b) & c,
    0xFC: lambda a, b, _: a | b,
    0xFA: lambda a, _, c: a | c,
    0xEE: lambda _, b, c: b | c,
    0xCA: lambda a, b, c: ((b ^ c) & a) ^ c,
    0xE8: lambda a, b, c: (a & b) | ((a | b) & c),
}
"""Tables whose sum of products is longer than what one would write."""


@pure("lop3", types=("b32", "b32", "b32", "b32", "pred"))
def lop3(i: Instruction) -> Function:
    """Logic lop3: d = F(a, b, c), immLut = F(0xF0, 0xCC, 0xAA); and p = (d != 0) BoolOp q."""
    modifiers = Modifiers(i)
    combine = modifiers.one_of("and", "or", default="none")
    modifiers.one_of("b32")
    modifiers.done()
    operand_count(i, 5 if combine == "none" else 6)
    table = immediate(i, i.operands[4]) & 0xFF
    function = _FAST_TABLES.get(table) or lookup(table)
    if combine == "none":
        return lambda a, b, c, _: function(a, b, c)
    if not isinstance(i.operands[0], PairDestination):
        raise UnsupportedInstruction(i, "a destination d|p is needed with and, or")
    join = np.bitwise_and if combine == "and" else np.bitwise_or

    def with_predicate(a: Array, b: Array, c: Array, _: Array, q: Array) -> tuple[Array, Array]:
        result = function(a, b, c)
        return result, join(result != 0, q)

    return with_predicate


def _selected(a: Array, b: Array, nibbles: Array) -> Array:
    """Bytes of the pair (b, a) that `nibbles`, (lanes, 4) or (4,), selects; bit 3 spreads the sign."""
    pair = ((b.astype(_U64) << np.uint64(32)) | a).view(_U8).reshape(-1, 8)
    byte = nibbles & 7
    chosen = pair[:, byte] if byte.ndim == 1 else np.take_along_axis(pair, byte, axis=1)
    signs = np.where(chosen & 0x80, np.uint8(0xFF), np.uint8(0))
    return np.ascontiguousarray(np.where(nibbles & 8, signs, chosen)).view(_U32).reshape(-1)


_NIBBLE: Final = np.array([0, 4, 8, 12], np.uint32)
_PRMT_MODES: Final = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}
"""Bytes of (b, a) for each value of c's two low bits, lowest byte first (PTX's tables, reversed)."""

_HALVES: Final = {0x5410: (0, 0), 0x7632: (1, 1), 0x7610: (0, 1), 0x5432: (1, 0)}
"""Selectors that put a 16-bit half of a (the first number) below a half of b."""


def _join_halves(low: int, high: int) -> Function:
    def join(a: Array, b: Array, _: Array) -> Array:
        result = np.empty_like(a)
        halves = result.view(_U16)
        halves[0::2] = a.view(_U16)[low::2]
        halves[1::2] = b.view(_U16)[high::2]
        return result

    return join


def _join_bytes(nibbles: list[int]) -> Function:
    """Byte n of the result is byte nibbles[n] of the pair (b, a)."""

    def join(a: Array, b: Array, _: Array) -> Array:
        result = np.empty_like(a)
        target, sources = result.view(_U8), (a.view(_U8), b.view(_U8))
        for n, nibble in enumerate(nibbles):
            target[n::4] = sources[nibble >> 2][nibble & 3 :: 4]
        return result

    return join


@pure("prmt", types=("b32",))
def prmt(i: Instruction) -> Function:
    """Data movement prmt: each nibble of c picks a byte of {b, a}; "msb defines if the byte value should be
    copied, or if the sign (msb of the byte) should be replicated over all 8 bits". Modes use bits 0-1.
    """
    operand_count(i, 4)
    modifiers = Modifiers(i)
    modifiers.one_of("b32")
    mode = modifiers.one_of(*_PRMT_MODES, default="none")
    modifiers.done()
    selector = i.operands[3]
    if mode != "none":
        table = np.array(_PRMT_MODES[mode], np.uint32)
        return lambda a, b, c: _selected(a, b, table[c & 3])
    if not isinstance(selector, Immediate):
        return lambda a, b, c: _selected(a, b, (c[:, None] >> _NIBBLE) & 15)
    value = selector.bits(16)
    if value in _HALVES:
        return _join_halves(*_HALVES[value])
    nibbles = [value >> shift & 15 for shift in (0, 4, 8, 12)]
    if any(nibble & 8 for nibble in nibbles):
        fixed = np.array(nibbles, np.uint32)
        return lambda a, b, _: _selected(a, b, fixed)
    return _join_bytes(nibbles)
