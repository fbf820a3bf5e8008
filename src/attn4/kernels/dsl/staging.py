"""Rows of an accumulator to global memory through shared memory: a warp turns its 16 rows round in a place
of its own, and writes them whole. No warp waits for another.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.exchange import PIECE, piece_at

WARP_ROWS = 16


def by_matrices(product, thread, dtype):
    """How ``thread`` writes its part of an accumulator of ``product``, rounded, to shared memory, four
    matrices of 8 x 8 at once: the copy, and this thread's slice of it.
    """
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    return atom, cute.make_tiled_copy_C(atom, product).get_slice(thread)


class Staging(Fixed):
    """The rows of the warp of ``thread`` in ``tile``, (rows, columns) of shared memory as ``product`` deals
    them out.
    """

    def __init__(self, product, thread, tile):
        self.product = product
        self.thread = thread
        self.tile = tile

    @cute.jit
    def put(self, rounded):
        """Write a thread's part of an accumulator, rounded, where the warp finds whole rows."""
        atom, mine = by_matrices(self.product, self.thread, self.tile.element_type)
        cute.arch.sync_warp()
        cute.copy(atom, mine.retile(rounded), mine.partition_D(self.tile))

    @cute.jit
    def write(self, place: cutlass.Constexpr):
        """Copy what the warp has put to global memory.

        ``place`` tells for a row of the tile which row of the output it is, which may have fewer columns,
        and whether it exists.
        """
        dtype = self.tile.element_type
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=PIECE * 16)
        pieces = cute.size(self.tile, mode=[1]) // PIECE
        rows_at_once = cute.arch.WARP_SIZE // pieces
        steps = WARP_ROWS // rows_at_once
        lane = cute.arch.lane_idx()
        lane_row = lane // pieces
        piece = lane - lane_row * pieces
        first_row = self.thread // cute.arch.WARP_SIZE * WARP_ROWS
        staged = cute.zipped_divide(self.tile, (1, PIECE))
        held = cute.make_rmem_tensor((PIECE, steps), dtype)
        cute.arch.sync_warp()
        for step in cutlass.range_constexpr(steps):
            row = first_row + step * rows_at_once + cutlass.min(lane_row, rows_at_once - 1)
            cute.copy(atom, staged[(0, None), (row, piece)], held[None, step])
        for step in cutlass.range_constexpr(steps):
            target, exists = place(first_row + step * rows_at_once + lane_row)
            column = piece * PIECE
            if exists and column < cute.size(target) and lane_row < rows_at_once:
                cute.copy(atom, held[None, step], piece_at(target, column))
