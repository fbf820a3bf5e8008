"""Bulk tensor copies (TMA) of row tiles from global to shared memory."""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from attn4.kernels.dsl.carried import Fixed


def rows_first(tensor, packed: bool):
    """(batch, rows, heads, dim) as (rows, dim, heads, batch); packed (rows, heads, dim) gets a batch of 1."""
    if packed:
        layout = cute.select(tensor.layout, mode=[0, 2, 1])
        return cute.make_tensor(tensor.iterator, cute.append(layout, cute.make_layout(1, stride=0)))
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))


def bounded_rows(tensor):
    """A view through which a copy fills zeros past the end of any row range, not only past the tensor's.

    With R rows of stride s the view starts R s before the tensor and has one more mode of stride s. The
    range [begin, begin + length) is read at rows R - length on and extra coordinate begin + length: the
    address is the tensor's, and the hardware's bound R ends the range (Triton's "ragged" descriptor).
    A box must hold a row of the range: of one that is wholly outside the hardware reads the view's first
    element (measured, docs/measured-facts.md), and there may be no memory.
    """
    rows, dim, heads, batch = tensor.shape
    stride = tensor.stride
    start = cute.domain_offset((-rows, 0, 0, 0), tensor).iterator
    layout = cute.make_layout((rows, dim, heads, batch, 2 * rows + 1), stride=(*stride, stride[0]))
    return cute.make_tensor(start, layout)


class RowTiles(Fixed):
    """Copies (rows, dim) tiles of one head of one sequence into the slots of a ring.

    ``bounded``: the tensor is a ``bounded_rows`` view. ``pack``: heads that share a position's rows.
    ``share``: what CTA ``rank`` of a pair holds, (1, 0, rank) a half of the columns and (2, rank, 0) every
    second tile of rows; in general (step, first, column) is tile ``step * index + first`` of the rows at
    tile ``column`` of the columns. ``ctas`` of a cluster get each copy, at the same place.

    Rows past the end of a sequence are zeros, but for the first of a tile that has no others: there a bounded
    view shows the last of the sequence once more. What they give must be hidden by a mask.
    """

    def __init__(self, atom, tensor, shared, bounded: bool = False, pack: int = 1, share=(1, 0, 0), ctas=1):
        self.atom = atom
        self.tensor = tensor
        self.shared = shared
        self.bounded = bounded
        self.pack = pack
        self.step, self.first, self.column = share
        self.receivers = {"mcast_mask": cutlass.Int16((1 << ctas) - 1)} if ctas > 1 else {}

    @cute.jit
    def of_sequence(self, head: Int32, batch: Int32, begin: Int32, length: Int32):
        """The tiles of rows [begin, begin + length): (partition of the tensor, that of the slots, length)."""
        if cutlass.const_expr(self.bounded):
            rows = self.tensor.shape[0]
            mine = cute.domain_offset(
                (rows - length, 0), self.tensor[None, None, head, batch, begin + length]
            )
        else:
            mine = self.tensor[None, None, head, batch]
            offset = begin if cutlass.const_expr(self.pack == 1) else (0, begin)
            mine = cute.domain_offset((offset, 0), mine)
        there, here = cpasync.tma_partition(
            self.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.shared, 0, 2),
            cute.group_modes(self._tiles(mine), 0, 2),
        )
        return here, there, length

    @property
    def _tile(self) -> tuple[int, int]:
        rows, columns, *_ = (cute.size(mode) for mode in self.shared.shape)
        return rows, columns

    def _tiles(self, rows):
        """(rows of a tile, its columns, tiles), of a bounded view by their first rows."""
        if not self.bounded:
            return cute.local_tile(rows, self._tile, (None, self.column))
        first = cute.local_tile(rows, self._tile, (0, self.column))
        step = cute.make_layout(rows.shape[0], stride=rows.stride[0])
        return cute.make_tensor(first.iterator, cute.append(first.layout, step))

    def store(self, tiles, index, slot):
        """Start the copy of ``slot`` to tile ``index``, less what leaves the sequence."""
        target, source, _ = tiles
        place = index * self._tile[0] if self.bounded else index
        cute.copy(self.atom, source[None, slot], target[None, place])

    def copy(self, tiles, index, slot, barrier):
        """Start the copy of tile ``index`` into ``slot``; its bytes are reported on ``barrier``."""
        source, destination, length = tiles
        place = index * self.step + self.first
        if self.bounded:
            # The copy of a box that is wholly outside reads where the view begins, which may be nowhere.
            place = cutlass.min(place * self._tile[0], length - 1)
        cute.copy(
            self.atom, source[None, place], destination[None, slot], tma_bar_ptr=barrier, **self.receivers
        )


LOAD = cpasync.CopyBulkTensorTileG2SOp
LOAD_OF_PAIR = partial(LOAD, tcgen05.CtaGroup.TWO)
"""A load that reports its bytes to the first CTA of a pair."""
LOAD_OF_CLUSTER = cpasync.CopyBulkTensorTileG2SMulticastOp
"""A load into several CTAs of a cluster."""
STORE = cpasync.CopyBulkTensorTileS2GOp


def copy_atom(tensor, layout, tile, direction=LOAD):
    """A copy atom for tiles of ``tensor`` and the coordinate tensor that goes with it."""
    return cpasync.make_tiled_tma_atom(direction(), tensor, cute.select(layout, mode=[0, 1]), tile)


def packed_copy_atom(tensor, layout, tile, pack: int, direction=LOAD):
    """As ``copy_atom`` for tiles whose rows are ``pack`` heads of each position, heads first.

    Heads and rows are one mode for the copy; the coordinates returned are ((pack, rows), dim, groups, batch).
    """
    rows, dim, heads, batch = tensor.shape
    row_stride, dim_stride, head_stride, batch_stride = tensor.stride
    joint = cute.make_layout(
        ((heads, rows), dim, batch), stride=((head_stride, row_stride), dim_stride, batch_stride)
    )
    atom, joint_rows = copy_atom(
        cute.make_tensor(tensor.iterator, joint), layout, ((pack, tile[0] // pack), tile[1]), direction
    )
    (head_step, row_step), dim_step, batch_step = joint_rows.stride
    split = cute.make_layout(
        ((pack, rows), dim, heads // pack, batch),
        stride=((head_step, row_step), dim_step, head_step * pack, batch_step),
    )
    return atom, cute.make_tensor(joint_rows.iterator, split)
