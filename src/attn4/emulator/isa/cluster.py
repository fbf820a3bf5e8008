"""Shared addresses within a cluster (PTX 9.7.9.22 mapa, .23 getctarank, .20 isspacep)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.memory import GLOBAL_START, PARAMETER_BASE, is_global
from attn4.emulator.isa.registry import Function, Modifiers, UnsupportedInstruction, effect, pure, value_type
from attn4.emulator.ptx.module import Instruction
from attn4.emulator.state.block import OFFSET_MASK, RANK_SHIFT
from attn4.emulator.state.local import LOCAL_BASE

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Lanes = NDArray[Any]


def _width(i: Instruction) -> type[np.unsignedinteger[Any]]:
    modifiers = Modifiers(i)
    modifiers.flag("shared::cluster")
    kind = modifiers.one_of("u32", "u64")
    modifiers.done()
    return np.uint32 if kind == "u32" else np.uint64


@pure("mapa", types=lambda i: (value_type(i), "u32"))
def mapa(i: Instruction) -> Function:
    """PTX mapa: "the address in the shared memory window of CTA b that corresponds to" address a."""
    width = _width(i)
    offset, shift = width(OFFSET_MASK), width(RANK_SHIFT)
    return lambda address, rank: (address & offset) | (rank.astype(width) << shift)


@pure("getctarank", types=("T",))
def getctarank(i: Instruction) -> Function:
    """PTX getctarank: "the rank of the CTA" whose shared memory holds the address."""
    shift = _width(i)(RANK_SHIFT)
    return lambda address: (address >> shift).astype(np.uint32)


@effect("isspacep", types=("u64",))
def isspacep(i: Instruction) -> Function:
    """PTX isspacep: whether a generic address "falls within the specified state space window"."""
    modifiers = Modifiers(i)
    space = modifiers.one_of(
        "global", "local", "shared", "shared::cta", "shared::cluster", "param", "param::entry"
    )
    modifiers.done()

    def run(warp: Warp, _: Any, address: Lanes) -> Lanes:
        held = np.array([is_global(warp, int(one)) for one in address])
        return held if space == "global" else ~held & within(warp, address)

    def within(warp: Warp, address: Lanes) -> Lanes:
        if space.startswith("param"):
            return (address >= PARAMETER_BASE) & (address < LOCAL_BASE)
        if space == "local":
            return (address >= LOCAL_BASE) & (address < GLOBAL_START)
        if space == "shared::cluster":
            return address < PARAMETER_BASE
        own: Lanes = (address >> RANK_SHIFT) == warp.block.rank
        return own

    if len(i.operands) != 2:
        raise UnsupportedInstruction(i, f"{len(i.operands)} operands, 2 expected")
    return run
