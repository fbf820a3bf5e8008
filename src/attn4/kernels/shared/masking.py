"""Scores outside the mask become -inf, in registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, mma


@cute.jit
def seen(bounds: cutlass.Constexpr, tile, row, first_column: Int32):
    """The columns [begin, end) from ``first_column`` on that a row sees; one past the queries sees none."""
    position = bounds.position_in(tile, row)
    end = bounds.end_key(position, tile) - first_column
    end = end if position < tile.q_len else Int32(0)
    begin = Int32(0)
    if cutlass.const_expr(bounds.kind == "window"):
        begin = bounds.begin_key(position, tile) - first_column
    return begin, end


@cute.jit
def apply_mask(scores, bounds: cutlass.Constexpr, tile, rows, block: Int32):
    """Mask the scores of key block ``block``; ``rows`` are this thread's two rows within the row block."""
    by_row = mma.by_row(scores)
    first_column = block * bounds.tile_n + 2 * (cute.arch.lane_idx() % 4)
    for half in cutlass.range_constexpr(2):
        begin, end = seen(bounds, tile, rows[half], first_column)
        for i in cutlass.range_constexpr(cute.size(by_row, mode=[1])):
            column = 8 * (i // 2) + i % 2
            visible = column < end
            if cutlass.const_expr(bounds.kind == "window"):
                visible = visible and column >= begin
            by_row[half, i] = by_row[half, i] if visible else -Float32.inf


WORD = 32
"""Columns whose visibility is a word of bits, which the machine turns into predicates several at a time."""


@cute.jit
def mask_row(scores, bounds: cutlass.Constexpr, tile, row, block: Int32):
    """Mask the scores of key block ``block`` in a thread that holds all of ``row`` of the row block."""
    begin, end = seen(bounds, tile, row, block * bounds.tile_n)
    for first in cutlass.range_constexpr(0, cute.size(scores), WORD):
        hidden = math.bits_from(end - first)
        if cutlass.const_expr(bounds.kind == "window"):
            hidden = hidden | ~math.bits_from(begin - first)
        for bit in cutlass.range_constexpr(min(WORD, cute.size(scores) - first)):
            visible = hidden & Int32(math.signed_word(1 << bit)) == 0
            scores[first + bit] = scores[first + bit] if visible else -Float32.inf
