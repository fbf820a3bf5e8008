"""Tensor memory of an SM: 128 lanes by 512 columns of 32 bits (PTX 9.7.16.1).

    memory = TensorMemory()
    column = memory.allocate(128, owner)               # None: too few are free now, the instruction blocks
    memory.deallocate(column, 128, owner); memory.leaks()
    words = memory.read(lanes, column, count, owner)   # uint32 (lanes, count); lanes: slice or index array
    memory.write(lanes, column, words, owner)
    access = Access("32x32b", 8)
    registers = memory.load(access, warps, address, owner)     # tcgen05.ld: uint32 (registers, 32 * warps)
    memory.store(access, warps, address, registers, owner)     # tcgen05.st

``owner`` names the CTA that holds the columns: anything hashable. Addresses are lane << 16 | column. Every
access to columns that the owner does not hold is a TensorMemoryFault (used after dealloc, or never
allocated). ``on_unwritten`` as in ``memory``, called with (lane, column) pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from attn4.emulator.faults import EmulationError
from attn4.emulator.state.memory import POISON

LANES = 128
COLUMNS = 512
UNIT = 32  # columns; what is allocated is a power of two of at least so many
WARP_LANES = 32

Words = npt.NDArray[np.uint32]
Index = npt.NDArray[np.intp]
Lanes = slice | Index

# Registers a thread of the x1 form, lanes a warp touches, columns of the x1 form (PTX 9.7.16.8, table 49).
_SHAPES = {
    "32x32b": (1, 32, 1),
    "16x64b": (1, 16, 2),
    "16x128b": (2, 16, 4),
    "16x256b": (4, 16, 8),
    "16x32bx2": (1, 16, 1),
}


class TensorMemoryFault(EmulationError):  # noqa: N818
    """An access to tensor memory that the chip forbids, or a wrong allocation; the message says which."""


@dataclass(frozen=True, slots=True)
class Access:
    """The form of a tcgen05.ld or .st: shape, repeat (.x1-.x128), .pack/.unpack::16b.

    ``half_offset`` is how far the second half of a 16x32bx2 lies from the first, in columns.
    """

    shape: str
    repeat: int
    packed: bool = False
    half_offset: int = 0

    def __post_init__(self) -> None:
        if self.shape not in _SHAPES:
            raise TensorMemoryFault(f"tensor memory access of shape {self.shape}; {', '.join(_SHAPES)} exist")
        if self.repeat not in (1, 2, 4, 8, 16, 32, 64, 128) or self.registers > 128:
            raise TensorMemoryFault(f"tensor memory access .{self.shape}.x{self.repeat} does not exist")

    @property
    def registers(self) -> int:
        """Registers a thread."""
        return _SHAPES[self.shape][0] * self.repeat


class TensorMemory:
    """The tensor memory of one SM, poisoned, free."""

    __slots__ = ("_owners", "address", "on_unwritten", "peak", "words", "written")

    def __init__(self) -> None:
        self.words: Words = np.full((LANES, COLUMNS), POISON * 0x01010101, np.uint32)
        self.address = int(self.words.ctypes.data)
        self.written = np.zeros((LANES, COLUMNS), np.bool_)
        self.on_unwritten: Callable[[Any], None] | None = None
        self.peak = 0
        self._owners: list[Hashable | None] = [None] * (COLUMNS // UNIT)

    def allocate(self, columns: int, owner: Hashable) -> int | None:
        """First of ``columns`` columns that ``owner`` now holds, None if too few are free."""
        if columns < UNIT or columns > COLUMNS or columns & (columns - 1):
            raise TensorMemoryFault(f"allocation of {columns} columns; 32, 64, 128, 256 and 512 are allowed")
        units = columns // UNIT
        for first in range(0, COLUMNS // UNIT, units):
            if all(holder is None for holder in self._owners[first : first + units]):
                self._take(first, units, owner)
                return first * UNIT
        return None

    def deallocate(self, address: int, columns: int, owner: Hashable) -> None:
        """Give columns back and poison them. Raises TensorMemoryFault if ``owner`` does not hold them all."""
        column = address & 0xFFFF
        if address >> 16 or column % UNIT or columns % UNIT or columns <= 0:
            raise TensorMemoryFault(f"dealloc of {columns} columns at {address:#x}: not what alloc gave")
        self.check(column, columns, owner)
        self._take(column // UNIT, columns // UNIT, None)

    def leaks(self) -> dict[Hashable, int]:
        """Columns still held, by owner: empty when a grid ends well."""
        held = [holder for holder in self._owners if holder is not None]
        return {holder: held.count(holder) * UNIT for holder in held}

    def check(self, column: int, count: int, owner: Hashable) -> None:
        """Raise TensorMemoryFault unless ``owner`` holds columns ``column`` .. ``column + count``."""
        if column + count > COLUMNS:
            raise TensorMemoryFault(f"columns {column}..{column + count} of {COLUMNS}")
        for unit in range(column // UNIT, -(-(column + count) // UNIT)):
            if self._owners[unit] != owner:
                holder = "no one" if self._owners[unit] is None else f"CTA {self._owners[unit]}"
                what = f"CTA {owner} uses columns {column}..{column + count}"
                raise TensorMemoryFault(f"{what}; those from {unit * UNIT} on belong to {holder}")

    def read(self, lanes: Lanes, column: int, count: int, owner: Hashable) -> Words:
        """Words (lanes, count); a view where ``lanes`` is a slice."""
        self.check(column, count, owner)
        if self.on_unwritten is not None and not self.written[lanes, column : column + count].all():
            rows = np.arange(LANES)[lanes]
            bad_lane, bad_column = np.nonzero(~self.written[lanes, column : column + count])
            self.on_unwritten(np.stack((rows[bad_lane], bad_column + column), axis=1))
        return self.words[lanes, column : column + count]

    def write(self, lanes: Lanes, column: int, words: Words, owner: Hashable) -> None:
        """Write words (lanes, count)."""
        self.check(column, words.shape[1], owner)
        self.words[lanes, column : column + words.shape[1]] = words
        self.written[lanes, column : column + words.shape[1]] = True

    def load(self, access: Access, warps: Sequence[int], address: int, owner: Hashable) -> Words:
        """tcgen05.ld of ``warps`` (their numbers in the CTA, 32 threads each, in order) at one address; maybe
        a view of this memory.
        """
        window = self._window(access, warps, address, owner)
        if window is not None and self.on_unwritten is None:
            return self.words[window].T
        index = self._place(access, tuple(warps), address, owner)
        if self.on_unwritten is not None:
            bad = index[~self.written.reshape(-1).take(index)]
            if bad.size:
                self.on_unwritten(np.stack(np.divmod(bad, COLUMNS), axis=1))
        words = self.words.reshape(-1).take(index)
        if not access.packed:
            return words
        low, high = words[:, 0] & np.uint32(0xFFFF), words[:, 1] << np.uint32(16)
        return cast("Words", low | high)

    def store(
        self, access: Access, warps: Sequence[int], address: int, registers: Words, owner: Hashable
    ) -> None:
        """tcgen05.st of uint32 (registers, 32 * warps)."""
        window = self._window(access, warps, address, owner)
        if window is not None:
            self.words[window] = registers.T
            self.written[window] = True
            return
        index = self._place(access, tuple(warps), address, owner)
        if access.packed:
            registers = np.stack((registers & 0xFFFF, registers >> 16), axis=1)
        self.words.reshape(-1)[index] = registers
        self.written.reshape(-1)[index] = True

    def _window(
        self, access: Access, warps: Sequence[int], address: int, owner: Hashable
    ) -> tuple[slice, slice] | None:
        """Lanes and columns of an access of neighbouring warps in which each thread has a row of its own;
        None for all others, and where the address is wrong.
        """
        quarter, lane, column = warps[0] % 4, address >> 16, address & 0xFFFF
        count = len(warps)
        if (
            access.shape != "32x32b"
            or access.packed
            or warps[-1] - warps[0] != count - 1
            or quarter + count > 4
        ):
            return None
        if lane != 0 and (count > 1 or lane != quarter * WARP_LANES):
            return None
        self.check(column, access.repeat, owner)
        first = quarter * WARP_LANES
        return slice(first, first + count * WARP_LANES), slice(column, column + access.repeat)

    def _place(self, access: Access, warps: tuple[int, ...], address: int, owner: Hashable) -> Index:
        """Flat index of each register's word (of its two words, if packed)."""
        lane, column = address >> 16, address & 0xFFFF
        for warp in warps:
            # The lane field names the warp's own quarter or, as a plain column, none.
            if lane // WARP_LANES not in (0, warp % 4):
                raise TensorMemoryFault(
                    f"warp {warp} accesses lane {lane}; it reaches the 32 from {warp % 4 * 32}"
                )
        index, width = _fragment(access, tuple(warp % 4 for warp in warps), lane % WARP_LANES)
        self.check(column, width, owner)
        return index + column

    def _take(self, first: int, units: int, owner: Hashable | None) -> None:
        self._owners[first : first + units] = [owner] * units
        columns = slice(first * UNIT, (first + units) * UNIT)
        self.words[:, columns] = POISON * 0x01010101
        self.written[:, columns] = False
        self.peak = max(self.peak, UNIT * sum(holder is not None for holder in self._owners))


@lru_cache(maxsize=256)
def _fragment(access: Access, quarters: tuple[int, ...], lane: int) -> tuple[Index, int]:
    """Flat index of the words of each register, from column 0, and the columns that they span.

    The index is (registers, threads) or, packed, (registers, 2, threads): a packed register is the low halves
    of the words in two neighbouring columns.
    """
    _, height, width = _SHAPES[access.shape]
    if lane not in ((0, 16) if height == 16 else (0,)):
        raise TensorMemoryFault(f"tensor memory access .{access.shape} at lane {lane} of a warp's 32")
    rows, columns = _unit(access.shape)
    steps = np.arange(access.repeat)[:, None, None] * width
    columns = (columns + steps).reshape(-1, WARP_LANES)
    rows = np.tile(rows, (access.repeat, 1)) + lane
    if access.packed:
        rows, columns = rows[:, None], np.stack((2 * columns, 2 * columns + 1), axis=1)
    if access.shape == "16x32bx2":
        columns = columns + np.arange(WARP_LANES) // 16 * access.half_offset
    index = rows * COLUMNS + columns
    quarter = WARP_LANES * COLUMNS
    return np.concatenate([index + quarter * q for q in quarters], axis=-1), int(columns.max()) + 1


def _unit(shape: str) -> tuple[Index, Index]:
    """Lane and column of each register of the x1 form: (registers, 32 threads) each (PTX 9.7.16.2.3).

    16x64b: thread t holds lane (t % 2) 8 + t // 4 and column t // 2 % 2. 16x128b and 16x256b: like the
    accumulators of mma.m16n8, lane t // 4 (odd registers, or pairs, + 8) and 1 or 2 columns a thread of 4.
    """
    t, zero = np.arange(WARP_LANES), np.zeros((_SHAPES[shape][0], WARP_LANES), np.intp)
    i = np.arange(_SHAPES[shape][0])[:, None]
    if shape == "32x32b":
        return zero + t, zero
    if shape == "16x32bx2":
        return zero + t % 16, zero
    if shape == "16x64b":
        return zero + t % 2 * 8 + t // 4, zero + t // 2 % 2
    if shape == "16x128b":
        return zero + t // 4 + 8 * i, zero + t % 4
    return zero + t // 4 + 8 * (i // 2), zero + 2 * (t % 4) + i % 2
