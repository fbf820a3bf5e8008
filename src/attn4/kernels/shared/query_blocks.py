"""Blocks of queries as the workspaces of a backward pass keep them (see plan/workspace.py)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.shared.scheduler import sequence


def blocks_of_rows(plan, rows):
    """Blocks of the queries of a sequence."""
    return (rows + plan.tile_m - 1) // plan.tile_m


def count_query_blocks(plan, lengths):
    """Blocks of all sequences, as `attn4.plan.workspace.query_blocks` counts them."""
    if plan.cu_seqlens_q:
        return lengths.rows_q // plan.tile_m + lengths.batch + 1
    return lengths.batch * blocks_of_rows(plan, lengths.rows_q)


def first_block(plan, lengths, batch):
    """Where the blocks of sequence ``batch`` begin; what has no sequence gets those of the tail."""
    if plan.cu_seqlens_q:
        batch = cutlass.min(batch, lengths.batch)
        return lengths.cu_seqlens_q[batch] // plan.tile_m + batch
    return batch * blocks_of_rows(plan, lengths.rows_q)


@cute.jit
def find_block(plan: cutlass.Constexpr, lengths, number: Int32):
    """(sequence index, its extents, first row) of block ``number``; a block may begin past the last row."""
    low = Int32(0)
    if cutlass.const_expr(plan.cu_seqlens_q):
        # The last sequence that begins at or before the block; the tail is one past the others.
        high = Int32(lengths.batch)
        while low < high:
            middle = (low + high + 1) // 2
            begins = first_block(plan, lengths, middle)
            high = high if begins <= number else middle - 1
            low = middle if begins <= number else low
    else:
        low = number // cutlass.max(blocks_of_rows(plan, lengths.rows_q), 1)
    row = (number - first_block(plan, lengths, low)) * plan.tile_m
    return low, sequence(lengths, low), row
