"""Copies between registers (PTX "Data Movement": mov, cvta)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from attn4.emulator.isa.integer import register_type
from attn4.emulator.isa.registry import (
    WIDTHS,
    Array,
    Function,
    Modifiers,
    UnsupportedInstruction,
    operand_count,
    pure,
    value_type,
)
from attn4.emulator.ptx.module import Instruction, Register, Vector

_TYPES: Final = (
    "pred",
    *(f"{kind}{bits}" for kind in "bsu" for bits in (16, 32, 64)),
    *("b128", "f16", "bf16", "f16x2", "bf16x2", "f32", "f64"),
)


def _same(a: Array) -> Array:
    return a


def _mov_types(i: Instruction) -> tuple[str, ...]:
    source = i.operands[1]
    if not isinstance(source, Vector):
        return ("T",)
    return (f"b{WIDTHS[value_type(i)] // len(source.items)}",)


def _part_type(i: Instruction, kind: str, vector: Vector) -> np.dtype[Any]:
    bits, count = WIDTHS[kind], len(vector.items)
    part = bits // count
    if count not in (2, 4) or kind[0] != "b" or part not in (8, 16, 32, 64):
        raise UnsupportedInstruction(i, f"{count} parts of type {kind}")
    for item in vector.items:
        if isinstance(item, Register) and item.type != f"b{part}":
            raise UnsupportedInstruction(i, f"{item.text} is not a register of {part} bits")
    return np.dtype(f"u{part // 8}")


@pure("mov", types=_mov_types)
def mov(i: Instruction) -> Function:
    """Data movement mov: d = a; a vector is packed or unpacked, its first element the least significant.

    A .b128 register is an array of shape (lanes, 2), the lower half first.
    """
    operand_count(i, 2)
    modifiers = Modifiers(i)
    kind = modifiers.one_of(*_TYPES)
    modifiers.done()
    destination, source = i.operands
    if isinstance(destination, Vector) and isinstance(source, Vector):
        raise UnsupportedInstruction(i, "a vector on both sides")
    if isinstance(source, Vector):
        return _packed(_part_type(i, kind, source), len(source.items), kind)
    if isinstance(destination, Vector):
        return _unpacked(_part_type(i, kind, destination), len(destination.items))
    return _same


def _packed(part: np.dtype[Any], count: int, kind: str) -> Function:
    def pack(*parts: Array) -> Array:
        whole = np.empty(len(parts[0]) * count, part)
        for n in range(count):
            whole[n::count] = parts[n]
        return whole.view(np.uint64).reshape(-1, 2) if kind == "b128" else whole.view(register_type(kind))

    return pack


def _unpacked(part: np.dtype[Any], count: int) -> Function:
    def unpack(whole: Array) -> tuple[Array, ...]:
        parts = whole.reshape(-1).view(part).reshape(-1, count).T.copy()
        return tuple(parts)

    return unpack


@pure("cvta")
def cvta(i: Instruction) -> Function:
    """Data movement cvta: to and from generic addresses, which here are the addresses themselves."""
    operand_count(i, 2)
    modifiers = Modifiers(i)
    modifiers.flag("to")
    modifiers.one_of(
        "const", "global", "local", "shared", "shared::cta", "shared::cluster", "param", "param::entry"
    )
    modifiers.one_of("u32", "u64")
    modifiers.done()
    return _same
