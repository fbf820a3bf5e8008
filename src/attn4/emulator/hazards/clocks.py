"""Vector clocks: what each thread of a cluster knows to have happened before its next instruction.

A *column* stands for whatever performs accesses one after the other: a thread, or an engine that works for
one (the copies that complete on an mbarrier, the products of a warp, ...). An access is stamped with a column
and an *epoch* of it; a thread may touch what the access touched when its clock holds that epoch or a later
one. The epoch of a thread is a counter of its warp, advanced when a lane releases: whoever acquires that
release knows what the lane did up to then.

What a thread knows is a row of four planes (PTX 8.9.5, 9.7.16.6):

``ORDERED``   happened before, in base causality order
``FENCED``    and a ``fence.proxy.async`` lies on the way: visible to the async proxy
``FINISHED``  a tcgen05 operation that a ``tcgen05.fence::before_thread_sync`` has put before the way
``TENSOR``    and a ``tcgen05.fence::after_thread_sync`` behind it

The lanes of a warp share one row, because they mostly learn together; a lane that learned something alone has
a row of its own until the warp knows as much. What a lane did itself stands in no row: ``own`` tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Row = NDArray[np.int32]
"""(planes, columns)."""

ORDERED: Final = 0
FENCED: Final = 1
FINISHED: Final = 2
TENSOR: Final = 3
PLANES: Final = 4

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
    """The clocks of one cluster of ``blocks`` CTAs of ``threads`` threads each."""

    def __init__(self, threads: int, blocks: int) -> None:
        self.warps_a_block = -(-threads // WARP)
        self.threads = self.warps_a_block * WARP * blocks
        warps = self.warps_a_block * blocks
        self.columns: list[Column] = []
        self.rows = np.zeros((warps, PLANES, self.threads + _GROWTH), np.int32)
        self.alone: dict[int, Row] = {}
        self.epochs = np.ones(warps, np.int32)
        self.fenced = np.zeros(self.threads, np.int32)
        absent = np.arange(self.threads) % (self.warps_a_block * WARP) >= threads
        self.rows[:, :, : self.threads][:, :, absent] = ALWAYS

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
            self.alone = {thread: self.widened(row, self.width) for thread, row in self.alone.items()}
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
        if self.alone:
            found = self.alone.get(thread)
            if found is not None:
                return found
        known: Row = self.rows[thread // WARP]
        return known

    def common(self, who: Who, plane: int) -> NDArray[np.int32]:
        """What all lanes of ``who`` know, in one plane; less than that if one knows something alone."""
        rows = self.rows[who.warps, plane]
        least: NDArray[np.int32] = rows[0] if len(rows) == 1 else rows.min(axis=0)
        return least

    def release(self, who: Who, mask: Mask | None) -> Row:
        """What the lanes of ``mask`` (None: all) know and did, as one row; they begin a new epoch."""
        own = slice(who.first, who.first + who.lanes)
        warps = who.warps
        epochs = self.epochs[warps]
        if mask is None and not self._any_alone(who):
            rows = self.rows[warps]
            row: Row = rows[0].copy() if len(rows) == 1 else rows.max(axis=0)
        else:
            row = self._joined(who, mask)
        # What is passed on needs a fence::before_thread_sync here, and a fence::after_thread_sync there.
        row[TENSOR] = 0
        if mask is None:
            row[ORDERED, own] = np.repeat(epochs, WARP)
            row[FENCED, own] = self.fenced[own]
            self.epochs[warps] += 1
        else:
            lanes = np.flatnonzero(mask)
            row[ORDERED, lanes + who.first] = epochs[lanes // WARP]
            row[FENCED, lanes + who.first] = self.fenced[lanes + who.first]
            self.epochs[warps][np.unique(lanes // WARP)] += 1
        return row

    def acquire(self, who: Who, mask: Mask | None, row: Row) -> None:
        """Let the lanes of ``mask`` (None: all) know what ``row`` holds."""
        if mask is None:
            rows = self.rows[who.warps]
            np.maximum(rows, row, out=rows)
            if self.alone:
                self._rejoin(who, row)
            return
        for lane in np.flatnonzero(mask).tolist():
            own = self._own_row(who.first + lane)
            np.maximum(own, row, out=own)

    def known_to_block(self, rank: int) -> Row:
        """What any thread of a CTA knows."""
        warps = slice(rank * self.warps_a_block, (rank + 1) * self.warps_a_block)
        known: Row = self.rows[warps].max(axis=0)
        for thread, row in self.alone.items():
            if warps.start <= thread // WARP < warps.stop:
                np.maximum(known, row, out=known)
        return known

    def meet(self, who: Who, mask: Mask | None) -> None:
        """The lanes of each warp learn from each other what they know and did: bar.warp.sync."""
        for warp in range(who.warps.start, who.warps.stop):
            one = Who(warp * WARP, WARP)
            at = one.first - who.first
            lanes = None if mask is None else mask[at : at + WARP]
            if lanes is None or lanes.any():
                self.acquire(one, lanes, self.release(one, lanes))

    def learn(self, who: Who, mask: Mask | None, column: int, epoch: int, planes: tuple[int, ...]) -> None:
        """Let the lanes of ``mask`` know one epoch of one column."""
        for row in self._rows_of(who, mask):
            for plane in planes:
                row[plane, column] = max(row[plane, column], epoch)

    def raise_plane(self, who: Who, mask: Mask | None, plane: int, by: int) -> None:
        """Let what is known in plane ``by`` be known in ``plane``, too: what a fence does."""
        for row in self._rows_of(who, mask):
            np.maximum(row[plane], row[by], out=row[plane])

    def fence(self, who: Who, mask: Mask | None) -> None:
        """fence.proxy.async: what the lanes did and know is visible to the async proxy."""
        self.raise_plane(who, mask, FENCED, ORDERED)
        threads = np.arange(who.first, who.first + who.lanes)
        if mask is not None:
            threads = threads[mask]
        self.fenced[threads] = self.epochs[threads // WARP]
        self.epochs[np.unique(threads // WARP)] += 1

    def own(self, thread: int, plane: int) -> int:
        """The epoch up to which a thread may rely on what it did itself."""
        return int(self.fenced[thread]) if plane == FENCED else int(ALWAYS)

    def _rows_of(self, who: Who, mask: Mask | None) -> list[Row]:
        if mask is not None:
            return [self._own_row(who.first + lane) for lane in np.flatnonzero(mask).tolist()]
        rows = list(self.rows[who.warps])
        if self.alone:
            span = range(who.first, who.first + who.lanes)
            rows += [row for thread, row in self.alone.items() if thread in span]
        return rows

    def _own_row(self, thread: int) -> Row:
        row = self.alone.get(thread)
        if row is None:
            row = self.alone[thread] = self.rows[thread // WARP].copy()
        return row

    def _any_alone(self, who: Who) -> bool:
        return bool(self.alone) and any(who.first <= t < who.first + who.lanes for t in self.alone)

    def _joined(self, who: Who, mask: Mask | None) -> Row:
        lanes = range(who.lanes) if mask is None else np.flatnonzero(mask).tolist()
        threads = [who.first + lane for lane in lanes]
        row: Row = self.rows[threads[0] // WARP].copy()
        for warp in {thread // WARP for thread in threads}:
            np.maximum(row, self.rows[warp], out=row)
        for thread in threads:
            found = self.alone.get(thread)
            if found is not None:
                np.maximum(row, found, out=row)
        return row

    def _rejoin(self, who: Who, row: Row) -> None:
        """Rows of single lanes learn, too; one that holds no more than its warp's is given up."""
        for thread in [t for t in self.alone if who.first <= t < who.first + who.lanes]:
            alone = self.alone[thread]
            np.maximum(alone, row, out=alone)
            if (alone <= self.rows[thread // WARP]).all():
                del self.alone[thread]


def lane_mask(mask: Any, alive: Mask) -> Mask | None:
    """``mask``, or None if it holds all living lanes."""
    return None if (mask == alive).all() else mask
