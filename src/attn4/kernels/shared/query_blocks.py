"""Blocks of queries as the workspaces of a backward pass keep them (see plan/workspace.py)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from attn4.kernels.shared.scheduler import sequence

MOST_ROWS_OF_CTAS = 2**16 - 1
"""The second dimension of a grid."""


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


def block_grid(workspace):
    """A CTA for each block of each head, in layers of heads where a grid has no room for all side by side."""
    heads, blocks, _ = workspace.minus_lse.shape
    layers = (heads + MOST_ROWS_OF_CTAS - 1) // MOST_ROWS_OF_CTAS
    return [blocks, cutlass.min(heads, MOST_ROWS_OF_CTAS), layers]


def block_of_cta():
    """(head, block) of a CTA of a ``block_grid``; of the last layer some heads are past the last one."""
    block, head, layer = cute.arch.block_idx()
    return layer * cute.arch.grid_dim()[1] + head, block


def sums_of_block(sums, head, block):
    """A block of ``sums``, (heads, blocks, elements), by a number of 64 bits, as its offset leaves 32: 2^18
    blocks of 64 rows and 128 columns are 2^31 elements.
    """
    return sums[head, Int64(block), None]


def sums_of_sequence(plan, lengths, sums, batch):
    """``sums`` from the blocks of sequence ``batch`` on."""
    return cute.domain_offset((0, Int64(first_block(plan, lengths, batch)), 0), sums)
