"""Vector clocks: what each thread of a cluster knows to have happened before its next instruction.

A *column* stands for whatever performs accesses one after the other: a thread, or an engine that works for
one (the copies that complete on an mbarrier, the products of a warp, ...). An access is stamped with a column
and an *epoch* of it; a thread may touch what the access touched when its clock holds that epoch or a later
one. The epoch of a thread is a counter of its warp, advanced when a lane releases: whoever acquires that
release knows what the lane did up to then.

What a thread knows is a row of five planes (PTX 8.9.5, 9.7.16.6):

``ORDERED``   happened before, in base causality order
``FENCED``    and a ``fence.proxy.async`` lies on the way: visible to the async proxy in shared memory
``DEVICE``    the same in global memory
``FINISHED``  a tcgen05 operation that a ``tcgen05.fence::before_thread_sync`` has put before the way
``TENSOR``    and a ``tcgen05.fence::after_thread_sync`` behind it

The lanes of a warp share one row, because they mostly learn together; a lane that learned something alone has
a row of its own until the warp knows as much. What a lane did itself stands in no row: ``own`` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Row = NDArray[np.int32]
"""(planes, columns)."""

ORDERED: Final = 0
FENCED: Final = 1
FINISHED: Final = 2
TENSOR: Final = 3
DEVICE: Final = 4
PLANES: Final = 5

WARP: Final = 32
ALWAYS: Final = np.iinfo(np.int32).max
_GROWTH = 64


@dataclass(frozen=True, slots=True)
class Column:
    """Who acts in a column: ``name`` for reports, ``missing`` the order that a finding says is missing.

    ``tensor`` marks the engines of tcgen05; ``pipelined`` those of .mma, .cp and .shift, whose operations run
    in the order of issue.
    """

    name: str
    missing: str
    tensor: bool = False
    pipelined: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Who:
    """The lanes of an array of warps in their cluster: ``first`` is the thread of lane 0, counted there."""

    first: int
    lanes: int

    @property
    def warps(self) -> slice:
        """The rows of its warps."""
        return slice(self.first // WARP, (self.first + self.lanes) // WARP)


class Clocks:
    """The clocks of one cluster of ``blocks`` CTAs of ``threads`` threads each, ``together`` warps an array.

    ``rows`` holds a row for each warp, ``alone`` by warp those of single lanes, ``epochs`` the epoch of each
    warp, ``fenced`` the last epochs of each thread that it has fenced, ``living`` who has not exited.
    """

    def __init__(self, threads: int, blocks: int, together: int = 1) -> None:
        self.warps_a_block = -(-threads // (WARP * together)) * together
        self.threads = self.warps_a_block * WARP * blocks
        warps = self.warps_a_block * blocks
        self.columns: list[Column] = []
        self.rows = np.zeros((warps, PLANES, self.threads + _GROWTH), np.int32)
        self.alone: dict[int, dict[int, Row]] = {}
        self.epochs = np.ones(warps, np.int32)
        self.fenced = {plane: np.zeros(self.threads, np.int32) for plane in (FENCED, DEVICE)}
        self.living = np.arange(self.threads) % (self.warps_a_block * WARP) < threads
        self.rows[:, :, : self.threads][:, :, ~self.living] = ALWAYS

    @property
    def width(self) -> int:
        """Columns of a row, those not in use yet included."""
        return int(self.rows.shape[2])

    def column(self, column: Column) -> int:
        """A new column."""
        index = self.threads + len(self.columns)
        self.columns.append(column)
        if index >= self.width:
            self.rows = self.widened(self.rows, self.width + _GROWTH)
            for lanes in self.alone.values():
                lanes.update({thread: self.widened(row) for thread, row in lanes.items()})
        return index

    def widened(self, rows: NDArray[np.int32], width: int | None = None) -> NDArray[np.int32]:
        """``rows`` with as many columns as those of the clocks."""
        width = width or self.width
        if rows.shape[-1] == width:
            return rows
        wide = np.zeros((*rows.shape[:-1], width), np.int32)
        wide[..., : rows.shape[-1]] = rows
        return wide

    def row(self, thread: int) -> Row:
        """What one thread knows, but for what it did itself."""
        warp = thread // WARP
        if self.alone:
            lanes = self.alone.get(warp)
            if lanes is not None and thread in lanes:
                return lanes[thread]
        known: Row = self.rows[warp]
        return known

    def common(self, who: Who, plane: int) -> NDArray[np.int32]:
        """What all lanes of ``who`` know, in one plane; less than that if one knows something alone."""
        rows = self.rows[who.warps, plane]
        least: NDArray[np.int32] = rows[0] if len(rows) == 1 else rows.min(axis=0)
        return least

    def release(self, who: Who, mask: Mask | None) -> Row:
        """What the lanes of ``mask`` (None: all) know and did, as one row; they begin a new epoch."""
        warps, lanes = self._split(who, mask)
        rows = [self.rows[warp] for warp in warps]
        if self.alone:
            rows += [row for warp in warps for row in self.alone.get(warp, {}).values()]
        rows += [self.row(thread) for thread in lanes]
        row: Row = rows[0].copy()
        for other in rows[1:]:
            np.maximum(row, other, out=row)
        # What is passed on needs a fence::before_thread_sync here, and a fence::after_thread_sync there.
        row[TENSOR] = 0
        for warp in warps:
            own = slice(warp * WARP, warp * WARP + WARP)
            row[ORDERED, own] = self.epochs[warp]
            for plane, fenced in self.fenced.items():
                row[plane, own] = fenced[own]
            self.epochs[warp] += 1
        for thread in lanes:
            row[ORDERED, thread] = self.epochs[thread // WARP]
            for plane, fenced in self.fenced.items():
                row[plane, thread] = fenced[thread]
        self.epochs[list({thread // WARP for thread in lanes})] += 1
        return row

    def acquire(self, who: Who, mask: Mask | None, row: Row) -> None:
        """Let the lanes of ``mask`` (None: all) know what ``row`` holds."""
        warps, lanes = self._split(who, mask)
        if isinstance(warps, range):
            rows = self.rows[who.warps]
            np.maximum(rows, row, out=rows)
        else:
            for warp in warps:
                np.maximum(self.rows[warp], row, out=self.rows[warp])
        if self.alone:
            for warp in warps:
                self._rejoin(warp, row)
        for thread in lanes:
            own = self._own_row(thread)
            np.maximum(own, row, out=own)

    def known_to_block(self, rank: int) -> Row:
        """What any thread of a CTA knows."""
        warps = range(rank * self.warps_a_block, (rank + 1) * self.warps_a_block)
        known: Row = self.rows[warps.start : warps.stop].max(axis=0)
        for warp in warps:
            for row in self.alone.get(warp, {}).values():
                np.maximum(known, row, out=known)
        return known

    def meet(self, who: Who, mask: Mask | None) -> None:
        """The lanes of each warp learn from each other what they know and did: bar.warp.sync."""
        warps, lanes = self._split(who, mask)
        for warp in warps:
            own = slice(warp * WARP, warp * WARP + WARP)
            row = self.rows[warp]
            for other in self.alone.pop(warp, {}).values():
                np.maximum(row, other, out=row)
            row[ORDERED, own] = np.where(self.living[own], self.epochs[warp], row[ORDERED, own])
            for plane, fenced in self.fenced.items():
                row[plane, own] = np.maximum(row[plane, own], fenced[own])
            self.epochs[warp] += 1
        for warp in {thread // WARP for thread in lanes}:
            one = Who(warp * WARP, WARP)
            some = np.isin(np.arange(WARP) + warp * WARP, lanes)
            self.acquire(one, some, self.release(one, some))

    def learn(self, who: Who, mask: Mask | None, column: int, epoch: int, planes: tuple[int, ...]) -> None:
        """Let the lanes of ``mask`` know one epoch of one column."""
        for row in self._rows_of(who, mask):
            for plane in planes:
                if row[plane, column] < epoch:
                    row[plane, column] = epoch

    def raise_plane(self, who: Who, mask: Mask | None, plane: int, by: int) -> None:
        """Let what is known in plane ``by`` be known in ``plane``, too: what a fence does."""
        for row in self._rows_of(who, mask):
            np.maximum(row[plane], row[by], out=row[plane])

    def fence(self, who: Who, mask: Mask | None, planes: Sequence[int]) -> None:
        """fence.proxy.async: what the lanes did and know is visible to the async proxy."""
        threads = np.arange(who.first, who.first + who.lanes)
        if mask is not None:
            threads = threads[mask]
        for plane in planes:
            self.raise_plane(who, mask, plane, ORDERED)
            self.fenced[plane][threads] = self.epochs[threads // WARP]
        self.epochs[np.unique(threads // WARP)] += 1

    def own(self, thread: int, plane: int) -> int:
        """The epoch up to which a thread may rely on what it did itself."""
        return int(self.fenced[plane][thread]) if plane in self.fenced else int(ALWAYS)

    def _split(self, who: Who, mask: Mask | None) -> tuple[Sequence[int], Sequence[int]]:
        """The warps of which all living lanes are in ``mask``, and the lanes of the others, as threads."""
        first = who.first // WARP
        if mask is None:
            return range(first, first + who.lanes // WARP), ()
        active = mask.reshape(-1, WARP)
        living = self.living[who.first : who.first + who.lanes].reshape(-1, WARP)
        some = active.any(axis=1)
        whole = (active == living).all(axis=1) & some
        warps: list[int] = (np.flatnonzero(whole) + first).tolist()
        if len(warps) == some.sum():
            return warps, ()
        rest: list[int] = (np.flatnonzero(active & ~whole[:, None]) + who.first).tolist()
        return warps, rest

    def _rows_of(self, who: Who, mask: Mask | None) -> list[Row]:
        warps, lanes = self._split(who, mask)
        rows: list[Row] = [self.rows[warp] for warp in warps]
        if self.alone:
            rows += [row for warp in warps for row in self.alone.get(warp, {}).values()]
        return rows + [self._own_row(thread) for thread in lanes]

    def _own_row(self, thread: int) -> Row:
        warp = thread // WARP
        lanes = self.alone.setdefault(warp, {})
        if thread not in lanes:
            lanes[thread] = self.rows[warp].copy()
        return lanes[thread]

    def _rejoin(self, warp: int, row: Row) -> None:
        """Rows of single lanes learn, too; one that holds no more than its warp's is given up."""
        lanes = self.alone.get(warp)
        if lanes is None:
            return
        for thread, alone in list(lanes.items()):
            np.maximum(alone, row, out=alone)
            if (alone <= self.rows[warp]).all():
                del lanes[thread]
        if not lanes:
            del self.alone[warp]
