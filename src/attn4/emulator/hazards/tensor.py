"""Accesses to tensor memory, checked against a shadow of it (PTX 9.7.16.6).

The shadow has a cell for 16 lanes of a column: every access covers such cells whole. An access of
tcgen05.mma, .cp or .shift may follow another of its kind once tcgen05 fences order the issue of the two, and
at once if one thread issues both; every other pair waits for the completion of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.clocks import DEVICE, FENCED, FINISHED, ORDERED, TENSOR, WARP, Mask, Who
from attn4.emulator.hazards.order import Engine
from attn4.emulator.hazards.shadow import NUMBER, STAMP
from attn4.emulator.state.block import RANK_SHIFT
from attn4.emulator.state.tensor_memory import Access

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.hazards.watch import Watch
    from attn4.emulator.ptx.module import Instruction
    from attn4.emulator.state.block import Block

Region = tuple[slice, slice]
"""Cells: rows of 16 lanes, and columns."""

ROW_LANES = 16
ROWS = 8
COLUMNS = 512


_COLUMNS_EACH = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}


@dataclass(slots=True, eq=False)
class TensorShadow:
    """Last writer of each cell, and the last read of it by each engine.

    ``settled`` are the regions that the engine ``current`` has written since another last touched anything:
    what stood in the way of its next write there, as by each step of a product, was looked at before.
    """

    writers: NDArray[np.int32] = field(default_factory=lambda: np.zeros((ROWS, COLUMNS), np.int32))
    written: NDArray[np.int64] = field(default_factory=lambda: np.zeros((ROWS, COLUMNS), np.int64))
    reads: NDArray[np.int64] = field(default_factory=lambda: np.zeros((4, ROWS, COLUMNS), np.int64))
    readers: list[int] = field(default_factory=list)
    current: int = -1
    settled: set[tuple[int, ...]] = field(default_factory=set)

    def turn(self, column: int) -> None:
        """An engine is about to touch something."""
        if self.current != column:
            self.current = column
            self.settled.clear()

    def slot(self, column: int) -> int:
        """Where the reads of a column are kept."""
        if column in self.readers:
            return self.readers.index(column)
        self.readers.append(column)
        if len(self.readers) > len(self.reads):
            self.reads = np.concatenate((self.reads, np.zeros_like(self.reads)))
        return len(self.readers) - 1


class TensorAccesses:
    """Reads and writes of tensor memory by the warps (ld, st) and by the engines of threads (mma, cp)."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def pipeline(self, warp: Warp, lane: int) -> Engine:
        """The engine of tcgen05.mma, .cp and .shift of a thread."""
        thread = self._watch.who(warp).first + lane
        name = f"a tcgen05 operation of {self._watch.thread(warp.block.cluster, thread)}"
        missing = "no tcgen05.commit whose mbarrier was waited for says that it is complete"
        return self._watch.engine(warp, "tcgen05", thread, name, missing)

    def accesses(self, warp: Warp, number: int, kind: str) -> Engine:
        """The engine of tcgen05.ld (``kind`` "ld") or .st of a warp, by its number in the CTA."""
        actor = (self._watch.who(warp).first - int(warp.threads[0])) // WARP + number
        name = f"tcgen05.{kind} of warp {number} of CTA {warp.block.index}"
        missing = f"no tcgen05.wait::{kind} of that warp, passed on by a barrier, says that it is over"
        return self._watch.engine(warp, f"tcgen05.{kind}", actor, name, missing)

    def waited(self, warp: Warp, mask: Mask, kind: str) -> None:
        """tcgen05.wait::ld or ::st of the warps with lanes in ``mask``."""
        for position, number in enumerate(warp.numbers):
            if mask[position * WARP : (position + 1) * WARP].any():
                self._complete(warp, number, self.accesses(warp, number, kind))

    def load(self, warp: Warp, access: Access, numbers: list[int], address: int, i: Instruction) -> None:
        """tcgen05.ld of the warps ``numbers`` at one address, its lane counted in the quarter of each."""
        for number in numbers:
            engine = self.accesses(warp, number, "ld")
            engine.issued += 1
            thread = self._first_thread(warp, number)
            for region in _regions(access, number % 4, address):
                self._read(warp, thread, warp.block, region, engine, i)
            if not self._watch.needs_wait:
                self._complete(warp, number, engine)

    def store(self, warp: Warp, access: Access, numbers: list[int], address: int, i: Instruction) -> None:
        """tcgen05.st of the warps ``numbers`` at one address, its lane counted in the quarter of each."""
        for number in numbers:
            engine = self.accesses(warp, number, "st")
            engine.issued += 1
            thread = self._first_thread(warp, number)
            for region in _regions(access, number % 4, address):
                self._write(warp, thread, warp.block, region, engine, i)

    def promised(self, warp: Warp, lane: int, addresses: list[int]) -> None:
        """tcgen05.commit was issued: it will arrive at mbarriers once what came before it is complete."""
        order = self._watch.of(warp.block.cluster).order
        engine = self.pipeline(warp, lane)
        for address in addresses:
            barrier = warp.block.mbarrier(address)
            sync = order.sync((address >> RANK_SHIFT, barrier.address))
            sync.promised[engine.column] = engine.issued

    def commits(self, warp: Warp, lane: int) -> Callable[[int], None]:
        """tcgen05.commit of a thread; what it returns is called with each mbarrier's address on its arrival.

        The arrival follows the thread's operations so far, which follow what the thread knew when it issued
        them: so it carries that, too, with the tcgen05.fence::before_thread_sync that the commit implies.
        """
        watched = self._watch.of(warp.block.cluster)
        engine = self.pipeline(warp, lane)
        issued = engine.issued
        row = watched.clocks.row(self._watch.who(warp).first + lane).copy()
        row[FINISHED] = np.maximum(row[FINISHED], row[ORDERED])
        row[TENSOR] = 0
        row[[ORDERED, FENCED, FINISHED, DEVICE], engine.column] = issued

        def arrive(address: int) -> None:
            barrier = warp.block.mbarrier(address)
            sync = watched.order.sync((address >> RANK_SHIFT, barrier.address))
            watched.order.arrive_with(sync, barrier.phase, row)

        return arrive

    def engine_reads(self, warp: Warp, lane: int, block: Block, region: Region, i: Instruction) -> None:
        """A product, issued by ``lane``, reads tensor memory of ``block``."""
        thread = self._watch.who(warp).first + lane
        self._read(warp, thread, block, region, self.pipeline(warp, lane), i)

    def engine_writes(
        self, warp: Warp, lane: int, block: Block, region: Region, i: Instruction, *, adds: bool = False
    ) -> None:
        """A product or copy, issued by ``lane``, writes tensor memory of ``block``, or ``adds`` to it."""
        engine = self.pipeline(warp, lane)
        shadow = self._shadow(block)
        shadow.turn(engine.column)
        rows, columns = region
        key = rows.start, rows.stop, rows.step or 1, columns.start, columns.stop
        if key in shadow.settled:
            shadow.written[region] = engine.issued << STAMP | self._watch.number(i)
            return
        thread = self._watch.who(warp).first + lane
        if adds and not shadow.written[region].all():
            self._tell_unwritten(warp, thread, shadow, region, i)
        self._write(warp, thread, block, region, engine, i)
        shadow.settled.add(key)

    def freed(self, warp: Warp, column: int, count: int, i: Instruction) -> None:
        """tcgen05.dealloc: all accesses to the columns must be over."""
        thread = self._watch.who(warp).first
        row = self._watch.of(warp.block.cluster).clocks.row(thread)
        known = np.maximum(row[ORDERED], row[FINISHED])
        region = (slice(0, ROWS), slice(column, column + count))
        shadow = self._shadow(warp.block)
        shadow.turn(-1)
        own = -1
        self._against_writers(warp, thread, shadow, region, known, own, i, "frees")
        self._against_readers(warp, thread, shadow, region, known, own, i, "frees")
        shadow.written[region] = 0
        shadow.reads[:, region[0], region[1]] = 0

    def _read(
        self, warp: Warp, thread: int, block: Block, region: Region, engine: Engine, i: Instruction
    ) -> None:
        shadow = self._shadow(block)
        shadow.turn(engine.column)
        known, own = self._known(warp, thread, engine)
        self._against_writers(warp, thread, shadow, region, known, own, i, "reads")
        if not shadow.written[region].all():
            self._tell_unwritten(warp, thread, shadow, region, i)
        stamp = engine.issued << STAMP | self._watch.number(i)
        slot = shadow.slot(engine.column)
        shadow.reads[slot][region] = stamp

    def _write(
        self, warp: Warp, thread: int, block: Block, region: Region, engine: Engine, i: Instruction
    ) -> None:
        shadow = self._shadow(block)
        shadow.turn(engine.column)
        known, own = self._known(warp, thread, engine)
        self._against_writers(warp, thread, shadow, region, known, own, i, "writes")
        self._against_readers(warp, thread, shadow, region, known, own, i, "writes")
        shadow.writers[region] = engine.column
        shadow.written[region] = engine.issued << STAMP | self._watch.number(i)

    def _complete(self, warp: Warp, number: int, engine: Engine) -> None:
        """All lanes of a warp learn that the operations of an engine are over."""
        clocks = self._watch.of(warp.block.cluster).clocks
        one = Who(self._first_thread(warp, number), WARP)
        clocks.learn(one, None, engine.column, engine.issued, (ORDERED, TENSOR))

    def _known(self, warp: Warp, thread: int, engine: Engine) -> tuple[NDArray[np.int32], int]:
        """What is known to be over, and the column whose operations are in order with the access (or -1)."""
        clocks = self._watch.of(warp.block.cluster).clocks
        row = clocks.row(thread)
        own = engine.column if clocks.columns[engine.column - clocks.threads].pipelined else -1
        if not self._watch.needs_fences:
            return row[ORDERED], own
        return (row[TENSOR] if own >= 0 else np.minimum(row[TENSOR], row[ORDERED])), own

    def _against_writers(
        self,
        warp: Warp,
        thread: int,
        shadow: TensorShadow,
        region: Region,
        known: NDArray[np.int32],
        own: int,
        i: Instruction,
        does: str,
    ) -> None:
        columns, stamps = shadow.writers[region], shadow.written[region]
        bad = (known.take(columns) < stamps >> STAMP) & (columns != own)
        if not bad.any():
            return
        seen: set[int] = set()
        for row, item in np.argwhere(bad).tolist():
            column, stamp = int(columns[row, item]), int(stamps[row, item])
            if column not in seen:
                seen.add(column)
                self._tell(warp, thread, region, (row, item), column, stamp, i, does, "wrote")

    def _against_readers(
        self,
        warp: Warp,
        thread: int,
        shadow: TensorShadow,
        region: Region,
        known: NDArray[np.int32],
        own: int,
        i: Instruction,
        does: str,
    ) -> None:
        count = len(shadow.readers)
        if not count:
            return
        latest = shadow.reads[:count, region[0], region[1]].max(axis=(1, 2))
        for slot in np.flatnonzero(latest >> STAMP > known[shadow.readers]).tolist():
            column = shadow.readers[slot]
            if column == own:
                continue
            stamps = shadow.reads[slot][region]
            row, item = np.argwhere(stamps >> STAMP > known[column])[0].tolist()
            self._tell(warp, thread, region, (row, item), column, int(stamps[row, item]), i, does, "read")

    def _tell(
        self,
        warp: Warp,
        thread: int,
        region: Region,
        at: tuple[int, int],
        column: int,
        stamp: int,
        i: Instruction,
        does: str,
        did: str,
    ) -> None:
        watch = self._watch
        cluster = warp.block.cluster
        clocks = watch.of(cluster).clocks
        number, epoch = stamp & NUMBER, stamp >> STAMP
        row = clocks.row(thread)
        if row[FINISHED, column] >= epoch:
            kind, missing = "unfenced", "no tcgen05.fence::after_thread_sync lies between the two"
        elif row[ORDERED, column] >= epoch:
            kind = "unfenced"
            missing = "no tcgen05.fence::before_thread_sync stands before the barrier that orders the two"
        else:
            kind, missing = "race", watch.missing(cluster, column)
        where = _cell(region, *at)
        who = watch.actor(cluster, column)
        message = f"{i.name} {does} tensor memory at {where} that {who} {did}: {missing}"
        other = f"{watch.instructions[number].name} by {who}, {watch.place(number)}"
        watch.report(kind, message, warp, thread, i, other, number=number)

    def _tell_unwritten(
        self, warp: Warp, thread: int, shadow: TensorShadow, region: Region, i: Instruction
    ) -> None:
        row, item = np.argwhere(shadow.written[region] == 0)[0].tolist()
        message = f"{i.name} reads tensor memory at {_cell(region, row, item)}, which no one wrote"
        self._watch.report("unwritten", message, warp, thread, i)

    def _shadow(self, block: Block) -> TensorShadow:
        shadows = self._watch.of(block.cluster).shadows
        found: TensorShadow | None = shadows.get(("tensor", block.rank))
        if found is None:
            found = shadows["tensor", block.rank] = TensorShadow()
        return found

    def _first_thread(self, warp: Warp, number: int) -> int:
        return self._watch.who(warp).first - int(warp.threads[0]) + number * WARP


def _cell(region: Region, row: int, item: int) -> str:
    lane = ROW_LANES * ((region[0].start or 0) + row * (region[0].step or 1))
    return f"lane {lane}, column {region[1].start + item}"


@lru_cache(maxsize=1024)
def _regions(access: Access, quarter: int, address: int) -> tuple[Region, ...]:
    """The cells that a warp of a quarter of the lanes accesses; those of 16 lanes begin at lane 0 or 16."""
    column = address & 0xFFFF
    count = _COLUMNS_EACH[access.shape] * access.repeat * (2 if access.packed else 1)
    if access.shape == "32x32b":
        return ((slice(2 * quarter, 2 * quarter + 2), slice(column, column + count)),)
    first = 2 * quarter + (address >> 16) % WARP // ROW_LANES
    rows = slice(first, first + 1)
    if access.shape != "16x32bx2":
        return ((rows, slice(column, column + count)),)
    second = column + access.half_offset
    return (rows, slice(column, column + count)), (rows, slice(second, second + count))
