"""Registers of a group of warps: one numpy array a register, one element a lane, raw bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from attn4.emulator.ptx.module import Register

Lanes = NDArray[Any]
"""An array of shape (lanes,)."""

STORAGE: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    "b8": np.uint8,
    "b16": np.uint16,
    "b32": np.uint32,
    "b64": np.uint64,
}
POISON = 0xCBCBCBCBCBCBCBCB
"""What a register holds that nobody wrote: bytes of 0xCB; a predicate is true."""


def full(value: int, storage: str, lanes: int) -> Lanes:
    """A read-only register that holds the low bits of ``value`` in all lanes."""
    kind = STORAGE[storage]
    bits = np.dtype(kind).itemsize * 8
    array = np.full(lanes, bool(value) if storage == "pred" else value & (1 << bits) - 1, dtype=kind)
    array.flags.writeable = False
    return array


def poisoned(registers: Sequence[Register], lanes: int) -> list[Lanes]:
    """The registers of a kernel before its first instruction; they share one read-only array a type."""
    fill = {storage: full(POISON, storage, lanes) for storage in STORAGE}
    wide = np.full((lanes, 2), POISON, dtype=np.uint64)
    return [wide if register.type == "b128" else fill[register.type] for register in registers]
