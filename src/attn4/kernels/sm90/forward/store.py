"""Output and LSE from registers to global memory, while the next tile is loaded.

A quad of lanes holds 2 columns of each group of 8. Four lanes exchange registers so that each owns 8 consecutive
columns of one group: 16 bytes a lane and 64 bytes a quad, with no shared memory and no barrier.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math
from attn4.kernels.dsl.carried import Fixed

QUAD = 4
COLUMNS = 8


class Store(Fixed):
    """Writes the rows of a tile that exist."""

    def __init__(self, plan, bounds, out, lse):
        self.plan = plan
        self.bounds = bounds
        self.out = out
        self.lse = lse

    @cute.jit
    def __call__(self, tile, output, lse, rows):
        """``output`` is a normalised accumulator; ``lse`` and ``rows`` belong to its two rows."""
        plan = self.plan
        words = [
            math.pack(output[2 * i], output[2 * i + 1], self.out.element_type)
            for i in range(cute.size(output) // 2)
        ]
        lane = cute.arch.lane_idx() % QUAD
        for half in cutlass.range_constexpr(2):
            row = tile.row_block * plan.tile_m + rows[half]
            position = self.bounds.position(row)
            head = tile.head
            if cutlass.const_expr(plan.pack_gqa > 1):
                head = tile.head * plan.pack_gqa + row - position * plan.pack_gqa
            exists = position < tile.q_rows
            self._store_row(tile, position, head, exists, words[half::2])
            if cutlass.const_expr(self.lse is not None):
                if exists and lane == 0:
                    if cutlass.const_expr(plan.cu_seqlens_q):
                        self.lse[head, tile.q_begin + position] = lse[half]
                    else:
                        self.lse[tile.batch, head, position] = lse[half]

    @cute.jit
    def _store_row(self, tile, position, head, exists, words):
        lane = cute.arch.lane_idx() % QUAD
        if cutlass.const_expr(self.plan.cu_seqlens_q):
            row = self.out[tile.q_begin + position, head, None]
        else:
            row = self.out[tile.batch, position, head, None]
        columns = cute.size(row)
        piece = cute.make_rmem_tensor(QUAD, Int32)
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.out.element_type, num_bits_per_copy=128)
        for group in cutlass.range_constexpr(len(words) // QUAD):
            exchanged = transpose_quad(words[QUAD * group : QUAD * (group + 1)], lane)
            for i in cutlass.range_constexpr(QUAD):
                piece[i] = exchanged[i]
            column = (QUAD * group + lane) * COLUMNS
            if exists and column < columns:
                target = cute.make_tensor((row.iterator + column).align(16), cute.make_layout(COLUMNS))
                cute.copy(atom, cute.recast_tensor(piece, self.out.element_type), target)


@cute.jit
def transpose_quad(words, lane):
    """Four registers of four lanes, transposed: lane t gets register t of lanes 0 to 3."""
    words = list(words)
    for bit in cutlass.range_constexpr(2):
        distance = 1 << bit
        upper = (lane // distance) % 2 == 1
        for low in cutlass.range_constexpr(QUAD):
            if cutlass.const_expr(low & distance == 0):
                high = low | distance
                sent = words[low] if upper else words[high]
                received = cute.arch.shuffle_sync_bfly(sent, offset=distance)
                words[low] = received if upper else words[low]
                words[high] = words[high] if upper else received
    return words
