"""After the backward kernel: the float32 sums of dQ, times the softmax scale, become dQ."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math
from attn4.kernels.shared.gradient_call import Workspace
from attn4.kernels.shared.query_blocks import find_block
from attn4.kernels.shared.scheduler import Lengths

THREADS = 128
GROUP = 4
"""Columns that lie together in the sums."""

ELEMENTS = 8
"""16 bytes of a row of dQ, what a thread writes at once."""

LANES = 4
"""Threads side by side in a row: 64 bytes together there, and eight rows of a group together in the sums."""


class Postprocess:
    """A CTA takes one block of queries of one head."""

    def __init__(self, plan):
        self.plan = plan

    def launch(self, workspace: Workspace, dq, lengths: Lengths, scale, stream):
        """Start it; ``dq`` is (rows, dim, heads, batch)."""
        heads, blocks = workspace.minus_lse.shape[0], workspace.minus_lse.shape[1]
        self.kernel(workspace, dq, lengths, scale).launch(
            grid=[blocks, heads, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, workspace: Workspace, dq: cute.Tensor, lengths: Lengths, scale: Float32):
        """Round a block; rows that see no key, and rows past the queries, are 0 whatever their sums hold."""
        plan = self.plan
        thread = cute.arch.thread_idx()[0]
        block, head, _ = cute.arch.block_idx()
        index, item, first = find_block(plan, lengths, block)
        batch = Int32(0) if cutlass.const_expr(plan.cu_seqlens_q) else index
        sums = workspace.dq_sum[head, block, None]
        rows = THREADS // LANES
        for step in cutlass.range(plan.tile_m // rows, unroll=1):
            row = step * rows + thread // LANES
            if first + row < item.q_rows:
                seen = workspace.minus_lse[head, block, row] != -Float32.inf
                target = dq[item.q_begin + first + row, None, head, batch]
                for part in cutlass.range_constexpr(plan.head_dim // (ELEMENTS * LANES)):
                    column = part * LANES + thread % LANES
                    if (column + 1) * ELEMENTS <= dq.shape[1]:
                        self.round(sums, row, column, target, scale if seen else Float32(0.0), seen)

    @cute.jit
    def round(self, sums, row: Int32, column: Int32, target, scale, seen):
        """``ELEMENTS`` columns of a row."""
        groups = cute.zipped_divide(sums, (GROUP,))
        words = cute.make_rmem_tensor(ELEMENTS // 2, Int32)
        for half in cutlass.range_constexpr(ELEMENTS // GROUP):
            values = cute.make_rmem_tensor(GROUP, Float32)
            place = (column * (ELEMENTS // GROUP) + half) * self.plan.tile_m + row
            cute.autovec_copy(groups[None, place], values)
            for pair in cutlass.range_constexpr(GROUP // 2):
                word = math.pack(values[2 * pair] * scale, values[2 * pair + 1] * scale, target.element_type)
                words[half * (GROUP // 2) + pair] = word if seen else Int32(0)
        cute.autovec_copy(
            cute.recast_tensor(words, target.element_type),
            cute.zipped_divide(target, (ELEMENTS,))[None, column],
        )
