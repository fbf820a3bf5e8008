"""Where registers lie when vector functions work on them: one buffer for each group of warps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.registry import WIDTHS
from attn4.emulator.ptx.module import Register
from attn4.emulator.state.memory import ByteMemory
from attn4.emulator.state.registers import POISON, STORAGE, Lanes

ALIGNMENT = 128
CONTEXT_WORDS = 10

Fixed = tuple[str, str]
"""What never changes in a warp, by kind ("special", "b32" or "b64" for a symbol) and name."""


Rows = tuple[Register, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets for each lane of one: a register lies at ``offset * lanes``, its lanes next to each other.

    The widest come first; from ``predicates`` on each lane takes one byte. ``rows`` are vectors of registers
    that lie next to each other in order. Nothing here follows the order of a set: another process must find
    the generated code again.
    """

    registers: dict[Register, int]
    fixed: dict[Fixed, int]
    types: dict[Fixed, str]
    predicates: int
    size: int
    rows: tuple[Rows, ...] = ()

    @classmethod
    def of(
        cls, registers: Iterable[Register], fixed: dict[Fixed, str], vectors: Iterable[Rows] = ()
    ) -> Layout:
        """A place for each register, and for each fixed value of a storage type.

        Of ``vectors``, of b32 registers, those that share none with an earlier one lie next to each other.
        """
        rows, joined = _disjoint(vectors)
        wanted: list[tuple[str, Register | Fixed]] = [(r.type, r) for r in (*joined, *registers)]
        wanted = list(dict.fromkeys(wanted))
        wanted += [(kind, name) for name, kind in fixed.items()]
        wanted.sort(key=lambda item: -_size(item[0]))
        places: dict[Register, int] = {}
        others: dict[Fixed, int] = {}
        at = predicates = 0
        for kind, item in wanted:
            if isinstance(item, Register):
                places[item] = at
            else:
                others[item] = at
            at += _size(kind)
            predicates += _size(kind) if kind != "pred" else 0
        return cls(places, others, dict(fixed), predicates, at, rows)


@dataclass(slots=True)
class Storage:
    """The buffer of one group of warps.

    ``context`` is the address of what vector functions are given: the addresses of the registers and of the
    mask in use, ``active``, and memories. ``views`` are the registers that Python
    touches, in the order of a warp's list (None stands for the others), and behind them the vectors of
    `Layout.rows`.
    """

    layout: Layout
    lanes: int
    active: NDArray[np.bool_] = field(init=False)
    context: int = field(init=False)
    views: list[Any] = field(default_factory=list)
    _buffer: NDArray[np.uint8] = field(init=False)
    _pointers: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        whole = np.empty((self.layout.size + 1) * self.lanes + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        end = start + self.layout.size * self.lanes
        self._buffer = whole[start:end]
        self.poison()
        self.active = whole[end : end + self.lanes].view(np.bool_)
        self._pointers = np.zeros(CONTEXT_WORDS, np.uint64)
        self._pointers[:2] = self._buffer.ctypes.data, self.active.ctypes.data
        self.context = int(self._pointers.ctypes.data)

    def attach(self, place: int, memory: ByteMemory) -> None:
        """Let vector functions find a memory: its bytes, its flags (0: none), first address and size."""
        flags = 0 if memory.written is None else memory.written.ctypes.data
        words = memory.bytes.ctypes.data, flags, memory.base, memory.bytes.size
        self._pointers[place : place + 4] = words

    def poison(self) -> None:
        """Make all registers what they are before anyone writes them."""
        self._buffer[:] = POISON & 0xFF
        self._buffer[self.layout.predicates * self.lanes :] = 1

    def register(self, register: Register) -> Lanes:
        """The lanes of a register."""
        return self._view(self.layout.registers[register], register.type)

    def fixed(self, name: Fixed) -> Lanes:
        """The lanes of a fixed value."""
        return self._view(self.layout.fixed[name], self.layout.types[name])

    def rows(self, registers: Rows) -> Lanes:
        """The lanes of a vector of `Layout.rows`, (registers, lanes)."""
        start = self.layout.registers[registers[0]] * self.lanes
        end = start + 4 * len(registers) * self.lanes
        return self._buffer[start:end].view(np.uint32).reshape(len(registers), self.lanes)

    def _view(self, offset: int, kind: str) -> Lanes:
        start = offset * self.lanes
        return self._buffer[start : start + _size(kind) * self.lanes].view(STORAGE[kind])


def _disjoint(vectors: Iterable[Rows]) -> tuple[tuple[Rows, ...], dict[Register, None]]:
    rows: dict[Rows, None] = {}
    joined: dict[Register, None] = {}
    for vector in vectors:
        if vector not in rows and joined.keys().isdisjoint(vector) and len(set(vector)) == len(vector):
            rows[vector] = None
            joined |= dict.fromkeys(vector)
    return tuple(rows), joined


def _size(kind: str) -> int:
    return max(WIDTHS[kind] // 8, 1)
