"""Before the backward kernel: row statistics of the queries, and zeros where dQ is summed.

delta = rowsum(dO * O) - dLSE is what the softmax's gradient subtracts from dP: dS = P * (dP - delta).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math
from attn4.kernels.shared.gradient_call import Results, Workspace
from attn4.kernels.shared.query_blocks import block_grid, block_of_cta, find_block, sums_of_block
from attn4.kernels.shared.scheduler import Lengths
from attn4.plan.workspace import LOCK_ELEMENTS

THREADS = 256
ELEMENTS = 8
"""16 bytes of a row of 16-bit elements, what a lane reads at once."""

MOST_LANES = 16


class Preprocess:
    """A CTA takes one block of queries of one head; a few lanes share a row."""

    def __init__(self, plan):
        self.plan = plan
        self.lanes = min(MOST_LANES, 1 << (plan.head_dim_v // ELEMENTS - 1).bit_length())

    def launch(self, results: Results, workspace: Workspace, lengths: Lengths, stream):
        """Start it; ``workspace`` gives the grid."""
        self.kernel(results, workspace, lengths).launch(
            grid=block_grid(workspace), block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, results: Results, workspace: Workspace, lengths: Lengths):
        """Zeros for a block's sums, which leave while its rows are read, and statistics of these."""
        plan = self.plan
        thread = cute.arch.thread_idx()[0]
        head, block = block_of_cta()
        index, item, first = find_block(plan, lengths, block)
        batch = Int32(0) if cutlass.const_expr(plan.cu_seqlens_q) else index
        queries = item.q_len if item.k_len > 0 else Int32(0)
        lane = thread % self.lanes
        if head < workspace.minus_lse.shape[0]:
            self.clear(sums_of_block(workspace.dq_sum, head, block), thread)
            for step in cutlass.range(plan.tile_m * self.lanes // THREADS, unroll=1):
                row = (step * THREADS + thread) // self.lanes
                here = first + row < queries
                place = item.q_begin + first + row
                # Lanes without a row read the first, which exists where any does.
                place = place if here else Int32(0)
                # Asked for beside dO and O: behind their sum it would be one more trip to memory a step.
                minus_lse, dlse = self.statistics(results, (place, head, batch))
                minus_delta = dlse - self.row_sum(results, (place, head, batch), lane)
                if lane == 0:
                    seen = here and minus_lse != Float32.inf
                    workspace.minus_lse[head, block, row] = minus_lse if seen else -Float32.inf
                    workspace.minus_delta[head, block, row] = minus_delta if seen else Float32(0.0)

    @cute.jit
    def row_sum(self, results: Results, place, lane: Int32):
        """rowsum(dO * O) of a row, in its first lane."""
        row, head, batch = place
        total = Float32(0.0)
        for part in cutlass.range_constexpr(0, self.plan.head_dim_v, self.lanes * ELEMENTS):
            group = part // ELEMENTS + lane
            if (group + 1) * ELEMENTS <= results.out.shape[1]:
                out = self.elements(results.out, (row, head, batch), group)
                dout = self.elements(results.dout, (row, head, batch), group)
                for i in cutlass.range_constexpr(ELEMENTS):
                    total += out[i].to(Float32) * dout[i].to(Float32)
        for bit in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
        return total

    def elements(self, tensor, place, group):
        """``ELEMENTS`` of a row of a (rows, dim, heads, batch) tensor, in registers."""
        row, head, batch = place
        values = cute.make_rmem_tensor(ELEMENTS, tensor.element_type)
        cute.autovec_copy(
            cute.zipped_divide(tensor[row, None, head, batch], (ELEMENTS,))[None, group], values
        )
        return values

    @cute.jit
    def statistics(self, results: Results, place):
        """-LSE in log2 units and the gradient of the LSE of a row."""
        dlse = Float32(0.0)
        if cutlass.const_expr(results.dlse is not None):
            dlse = self.of_row(results.dlse, place)
        return -self.of_row(results.lse, place) * math.LOG2_E, dlse

    def of_row(self, tensor, place):
        """The element of a row of an LSE-shaped tensor."""
        row, head, batch = place
        return tensor[head, row] if self.plan.cu_seqlens_q else tensor[batch, head, row]

    @cute.jit
    def clear(self, sums, thread: Int32):
        """Zeros in a vector, by all threads."""
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        groups = cute.zipped_divide(sums, (4,))
        count = self.plan.tile_m * self.plan.head_dim // 4
        for number in cutlass.range(count // THREADS, unroll=4):
            cute.autovec_copy(zeros, groups[None, number * THREADS + thread])
        if cutlass.const_expr(self.plan.deterministic):
            if thread < LOCK_ELEMENTS // 4:
                cute.autovec_copy(zeros, groups[None, count + thread])
