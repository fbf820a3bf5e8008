"""Rows of an accumulator to global memory without shared memory: the lanes of a row exchange registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

QUAD = 4
"""Lanes that share a row of a warpgroup accumulator."""

PIECE = 8
"""Elements of a 16-byte access, and columns of a group."""


@cute.jit
def store_exchanged(words, target, exists, first_column=0):
    """Write a row, if it ``exists``: ``words`` are this lane's pairs of 16-bit columns, two of each 8, from
    ``first_column`` on.

    Registers are exchanged within a quad: each lane ends with 8 consecutive columns, a quad with 64 bytes.
    ``target`` may have fewer columns than the row.
    """
    lane = cute.arch.lane_idx() % QUAD
    held = cute.make_rmem_tensor(QUAD, Int32)
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), target.element_type, num_bits_per_copy=PIECE * 16
    )
    for group in cutlass.range_constexpr(len(words) // QUAD):
        exchanged = transpose_quad(words[QUAD * group : QUAD * (group + 1)], lane)
        for i in cutlass.range_constexpr(QUAD):
            held[i] = exchanged[i]
        column = first_column + (QUAD * group + lane) * PIECE
        if exists and column < cute.size(target):
            piece = cute.recast_tensor(held, target.element_type)
            cute.copy(atom, piece, piece_at(target, column))


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


def piece_at(row, column):
    """The 16 bytes of an output row that start at ``column``, a multiple of 8."""
    return cute.make_tensor((row.iterator + column).align(16), cute.make_layout(PIECE))
