"""After the backward kernel: the float32 sums of dQ, times the softmax scale, become dQ."""

from __future__ import annotations

from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, mma
from attn4.kernels.dsl.exchange import store_exchanged
from attn4.kernels.shared.gradient_call import Workspace
from attn4.kernels.shared.query_blocks import block_grid, block_of_cta, find_block, sums_of_block
from attn4.kernels.shared.scheduler import Lengths
from attn4.kernels.shared.sums import GROUP, adding_groups, sum_layout

THREADS = 128
ELEMENTS = 8
"""16 bytes of a row of dQ, what a thread writes at once."""

LANES = 4
"""Threads side by side in a row: 64 bytes together there."""

MOST_COLUMNS = 64
"""Columns of sums that a thread has in registers at once."""

APART = 8
"""Rows so far apart are a thread's."""


class Postprocess:
    """A CTA takes one block of queries of one head."""

    def __init__(self, plan):
        self.plan = plan

    def launch(self, workspace: Workspace, dq, lengths: Lengths, scale, stream):
        """Start it; ``dq`` is (rows, dim, heads, batch)."""
        self.kernel(workspace, dq, lengths, scale).launch(
            grid=block_grid(workspace), block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, workspace: Workspace, dq: cute.Tensor, lengths: Lengths, scale: Float32):
        """Round a block; rows that see no key, and rows past the queries, are 0 whatever their sums hold."""
        plan = self.plan
        thread = cute.arch.thread_idx()[0]
        head, block = block_of_cta()
        index, item, first = find_block(plan, lengths, block)
        batch = Int32(0) if cutlass.const_expr(plan.cu_seqlens_q) else index
        if head < workspace.minus_lse.shape[0]:
            sums = sums_of_block(workspace.dq_sum, head, block)
            rows = cute.domain_offset((item.q_begin + first, 0), dq[None, None, head, batch])
            minus_lse = workspace.minus_lse[head, block, None]
            place = thread, item.q_rows - first
            if cutlass.const_expr(adding_groups(plan)):
                self.round_accumulators(sums, minus_lse, rows, place, scale)
            else:
                self.round_block(sums, minus_lse, rows, place, scale)

    @cute.jit
    def round_accumulators(self, sums, minus_lse, dq, place, scale):
        """`round_block` of sums that lie as accumulators of warpgroups: each lane reads what a lane added,
        so that a warp reads 512 bytes at once, and lanes of a row exchange what they have.
        """
        thread, count = place
        groups = adding_groups(self.plan)
        split = not mma.rows_split(self.plan.tile_m, groups)
        columns = self.plan.head_dim // (groups if split else 1)
        fours = gcd(columns, MOST_COLUMNS) // ELEMENTS
        parts = columns // (ELEMENTS * fours)
        layout = cute.make_layout((GROUP, fours), stride=(1, GROUP * THREADS * groups))
        for number in cutlass.range(groups * parts, unroll=1):
            group, part = number // parts, number % parts
            mine = sums.iterator + GROUP * ((part * fours * groups + group) * THREADS + thread)
            values = cute.make_rmem_tensor((GROUP, fours), Float32)
            cute.autovec_copy(cute.make_tensor(mine.align(GROUP * Float32.width // 8), layout), values)
            first_row = mma.first_row(thread) + (0 if split else mma.GROUP_ROWS * group)
            first_column = part * fours * ELEMENTS + (columns * group if split else 0)
            for half in cutlass.range_constexpr(2):
                row = first_row + 8 * half
                seen = minus_lse[row] != -Float32.inf
                words = cute.make_rmem_tensor(fours, Int32)
                for i in cutlass.range_constexpr(fours):
                    both = [values[2 * half + j, i] * scale for j in range(2)]
                    words[i] = math.pack(*both, dq.element_type) if seen else Int32(0)
                words = [words[i] for i in range(fours)]
                store_exchanged(words, dq[row, None], row < count, first_column)

    @cute.jit
    def round_block(self, sums, minus_lse, dq, place, scale):
        """This thread's part of a block, (thread, how many of its rows there are), to the rows of ``dq``."""
        thread, count = place
        pairs = THREADS // LANES
        for step in cutlass.range(self.plan.tile_m // (2 * pairs), unroll=1):
            pair = step * pairs + thread // LANES
            row = pair // APART * (2 * APART) + pair % APART
            if row < count:
                for part in cutlass.range_constexpr(self.plan.head_dim // (ELEMENTS * LANES)):
                    column = part * LANES + thread % LANES
                    if (column + 1) * ELEMENTS <= dq.shape[1]:
                        values = self.read(sums, row, column)
                        for half in cutlass.range_constexpr(2):
                            mine = row + half * APART
                            if mine < count:
                                seen = minus_lse[mine] != -Float32.inf
                                self.round(values[half, None], dq[mine, None], column, scale, seen)

    def read(self, sums, row: Int32, column: Int32):
        """(2, ``ELEMENTS``): columns of two rows of a block; the first is one of the first 8 of 16."""
        layout = sum_layout(self.plan)
        both = cute.composition(layout, (cute.make_layout(2, stride=APART), cute.make_layout(ELEMENTS)))
        first = cute.local_tile(
            cute.make_tensor(sums.iterator, layout), (1, ELEMENTS), (row, column)
        ).iterator
        if not self.plan.transposed_dq:
            first = first.align(GROUP * Float32.width // 8)
        mine = cute.make_tensor(first, both)
        values = cute.make_fragment_like(mine)
        cute.autovec_copy(mine, values)
        return values

    @cute.jit
    def round(self, values, target, column: Int32, scale, seen):
        """``ELEMENTS`` columns of a row."""
        words = cute.make_rmem_tensor(ELEMENTS // 2, Int32)
        for pair in cutlass.range_constexpr(ELEMENTS // 2):
            low, high = values[2 * pair] * scale, values[2 * pair + 1] * scale
            word = math.pack(low, high, target.element_type)
            words[pair] = word if seen else Int32(0)
        cute.autovec_copy(
            cute.recast_tensor(words, target.element_type),
            cute.zipped_divide(target, (ELEMENTS,))[None, column],
        )
