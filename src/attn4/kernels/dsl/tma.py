"""Bulk tensor copies (TMA) of row tiles from global to shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from attn4.kernels.dsl.carried import Fixed


def rows_first(tensor, packed: bool):
    """(batch, rows, heads, dim) as (rows, dim, heads, batch); packed (rows, heads, dim) gets a batch of 1."""
    if packed:
        layout = cute.select(tensor.layout, mode=[0, 2, 1])
        return cute.make_tensor(tensor.iterator, cute.append(layout, cute.make_layout(1, stride=0)))
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))


def bounded_rows(tensor):
    """A view through which a copy fills zeros past the end of any row range, not only past the tensor's.

    With R rows of stride s the view starts R s before the tensor and has one more mode of stride s. The range
    [begin, begin + length) is read at rows R - length on and extra coordinate begin + length: the address is
    the tensor's, and the hardware's bound R ends the range (the "ragged" descriptor of Triton and quack).
    """
    rows, dim, heads, batch = tensor.shape
    stride = tensor.stride
    start = cute.domain_offset((-rows, 0, 0, 0), tensor).iterator
    layout = cute.make_layout((rows, dim, heads, batch, 2 * rows + 1), stride=(*stride, stride[0]))
    return cute.make_tensor(start, layout)


class RowTiles(Fixed):
    """Copies (rows, dim) tiles of one head of one sequence into the slots of a ring."""

    def __init__(self, atom, tensor, tile, shared, bounded: bool):
        self.atom = atom
        self.tensor = tensor
        self.tile = tile
        self.shared = shared
        self.bounded = bounded

    @cute.jit
    def of_sequence(self, head: Int32, batch: Int32, begin: Int32, length: Int32):
        """The tiles of rows [begin, begin + length): (source partition by tile, destination by slot)."""
        if cutlass.const_expr(self.bounded):
            rows = self.tensor.shape[0]
            mine = cute.domain_offset(
                (rows - length, 0), self.tensor[None, None, head, batch, begin + length]
            )
        else:
            mine = cute.domain_offset((begin, 0), self.tensor[None, None, head, batch])
        source = cute.local_tile(mine, self.tile, (None, 0))
        destination, source = cpasync.tma_partition(
            self.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.shared, 0, 2),
            cute.group_modes(source, 0, 2),
        )
        return source, destination

    def copy(self, tiles, index, slot, barrier):
        """Start the copy of tile ``index`` into ``slot``; its bytes are reported on ``barrier``."""
        source, destination = tiles
        cute.copy(self.atom, source[None, index], destination[None, slot], tma_bar_ptr=barrier)


def load_atom(tensor, layout, tile):
    """A copy atom for tiles of ``tensor`` and the coordinate tensor that goes with it."""
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), tensor, cute.select(layout, mode=[0, 1]), tile
    )
