"""Output and LSE to global memory, while the next tile is loaded.

In an accumulator a lane owns two neighbouring columns of each group of 8, so a row would leave in pieces of
4 bytes. Where shared memory is left, a warp turns its 16 rows round there (``StagedStore``); else the four
lanes of a row exchange registers (``ExchangedStore``). Neither waits for another warp.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from attn4.kernels.dsl import math
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.exchange import PIECE, QUAD, piece_at, store_exchanged
from attn4.kernels.shared.softmax import to_operand

WARP_ROWS = 16


class Store(Fixed):
    """Writes the rows of a tile that exist."""

    def __init__(self, plan, bounds, outputs):
        self.plan = plan
        self.bounds = bounds
        self.out = outputs.out
        self.lse = outputs.lse
        self.atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), self.out.element_type, num_bits_per_copy=PIECE * 16
        )

    def out_row(self, tile, position, head):
        """The row of the output tensor."""
        if self.plan.cu_seqlens_q:
            return self.out[tile.q_begin + position, head, None]
        return self.out[tile.batch, position, head, None]

    @cute.jit
    def store_lse(self, tile, lse, rows):
        """Write the LSE of this thread's two rows; one lane of each quad does."""
        if cutlass.const_expr(self.lse is not None):
            for half in cutlass.range_constexpr(2):
                position, head = self.bounds.place(tile, rows[half])
                if position < tile.q_rows and cute.arch.lane_idx() % QUAD == 0:
                    if cutlass.const_expr(self.plan.cu_seqlens_q):
                        self.lse[head, tile.q_begin + position] = lse[half]
                    else:
                        self.lse[tile.batch, head, position] = lse[half]


class StagedStore(Store):
    """Rows turned round in ``staging``, 16 of each warp, and written whole."""

    def __init__(self, plan, bounds, outputs, output_mma, thread, staging):
        super().__init__(plan, bounds, outputs)
        self.output_mma = output_mma
        self.thread = thread
        self.staging = staging

    @cute.jit
    def __call__(self, tile, output, lse, rows):
        """``output`` is a normalised accumulator; ``lse`` and ``rows`` belong to its two rows."""
        rounded = cute.make_rmem_tensor(output.layout, self.out.element_type)
        to_operand(output, rounded)
        atom = cute.make_copy_atom(
            warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.out.element_type
        )
        mine = cute.make_tiled_copy_C(atom, self.output_mma).get_slice(self.thread)
        cute.arch.sync_warp()
        cute.copy(atom, mine.retile(rounded), mine.partition_D(self.staging))
        self.store_lse(tile, lse, rows)
        cute.arch.sync_warp()
        self._store_rows(tile)

    @cute.jit
    def _store_rows(self, tile):
        pieces = self.plan.head_dim_v // PIECE
        rows_at_once = cute.arch.WARP_SIZE // pieces
        steps = WARP_ROWS // rows_at_once
        lane = cute.arch.lane_idx()
        lane_row = lane // pieces
        piece = lane - lane_row * pieces
        first_row = self.thread // cute.arch.WARP_SIZE * WARP_ROWS
        staged = cute.zipped_divide(self.staging, (1, PIECE))
        held = cute.make_rmem_tensor((PIECE, steps), self.out.element_type)
        for step in cutlass.range_constexpr(steps):
            row = first_row + step * rows_at_once + cutlass.min(lane_row, rows_at_once - 1)
            cute.copy(self.atom, staged[(0, None), (row, piece)], held[None, step])
        for step in cutlass.range_constexpr(steps):
            position, head = self.bounds.place(tile, first_row + step * rows_at_once + lane_row)
            target = self.out_row(tile, position, head)
            column = piece * PIECE
            if position < tile.q_rows and column < cute.size(target) and lane_row < rows_at_once:
                cute.copy(self.atom, held[None, step], piece_at(target, column))


class ExchangedStore(Store):
    """Registers exchanged within a quad: each lane ends with 8 consecutive columns, a quad with 64 bytes."""

    @cute.jit
    def __call__(self, tile, output, lse, rows):
        """``output`` is a normalised accumulator; ``lse`` and ``rows`` belong to its two rows."""
        words = [
            math.pack(output[2 * i], output[2 * i + 1], self.out.element_type)
            for i in range(cute.size(output) // 2)
        ]
        for half in cutlass.range_constexpr(2):
            self._store_row(tile, rows[half], words[half::2])
        self.store_lse(tile, lse, rows)

    @cute.jit
    def _store_row(self, tile, row, words):
        position, head = self.bounds.place(tile, row)
        target = self.out_row(tile, position, head)
        store_exchanged(words, target, position < tile.q_rows)
