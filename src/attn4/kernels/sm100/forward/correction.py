"""The correcting role: rescales outputs whose maximum grew, and finishes each tile, off the softmax's path.

A factor for step j arrives after the scores of step j were full. With one slot of scores that is after the
output of step j - 1 was complete: products complete in the order of issue. With two it is not, and the output
is waited for; the product of step j + 1's scores runs meanwhile. A thread has the row that the softmax thread
of its number has.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, tensor_memory
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.shared.stream import next_tile
from attn4.kernels.shared.tiles import END_OF_WORK

PIECE = 16
"""Columns of the output that a thread holds at a time: few, as this role gives its registers away."""


class Corrector(Fixed):
    """Where outputs, statistics and the staging of every query tile lie, and where results go."""

    def __init__(self, plan, bounds, scalars, outputs, memory, thread):
        self.plan = plan
        self.bounds = bounds
        self.scale_log2 = scalars.scale_log2
        self.outputs = outputs
        tensor, self.row_stats, self.staging = memory
        self.columns = [tensor.columns("output", i) for i in range(plan.query_tiles)]
        self.thread = thread

    @cute.jit
    def rescale(self, i: cutlass.Constexpr[int], factor):
        """Multiply the row of query tile ``i`` by ``factor``; unless the plan has no branch here, a warp none
        of whose rows grew skips it.
        """
        if cutlass.const_expr(self.plan.softmax.branchless_rescale) or cute.arch.vote_any_sync(factor < 1.0):
            self._multiply(i, factor)

    @cute.jit
    def _multiply(self, i: cutlass.Constexpr[int], factor):
        tensor_memory.after_wait()
        for first in cutlass.range_constexpr(0, self.plan.head_dim_v, PIECE):
            values = self.load(i, first)
            for pair in cutlass.range_constexpr(PIECE // 2):
                values[2 * pair], values[2 * pair + 1] = cute.arch.mul_packed_f32x2(
                    (values[2 * pair], values[2 * pair + 1]), (factor, factor), ftz=True
                )
            tensor_memory.store(values, self.columns[i], first, self.thread)
        tensor_memory.wait_stores()

    def load(self, i: int, first: int):
        """``PIECE`` columns of the row of query tile ``i``."""
        values = cute.make_rmem_tensor(PIECE, Float32)
        tensor_memory.load(self.columns[i], first, values, self.thread)
        tensor_memory.wait_loads()
        return values

    @cute.jit
    def stage(self, i: cutlass.Constexpr[int], factor, exists):
        """Round the row of query tile ``i``, times ``factor``, into its staging area; zeros if it is
        padding.
        """
        dtype = self.staging.element_type
        for first in cutlass.range_constexpr(0, self.plan.head_dim_v, PIECE):
            values = self.load(i, first)
            words = cute.make_rmem_tensor(PIECE // 2, Int32)
            for pair in cutlass.range_constexpr(PIECE // 2):
                low, high = cute.arch.mul_packed_f32x2(
                    (values[2 * pair], values[2 * pair + 1]), (factor, factor), ftz=True
                )
                words[pair] = math.pack(low, high, dtype)
                if cutlass.const_expr(self.plan.seqused_q):
                    # It went through unmasked blocks with whatever is stored there, NaN too.
                    words[pair] = words[pair] if exists else Int32(0)
            self._put(i, first, words)

    @cute.jit
    def stage_zeros(self, i: cutlass.Constexpr[int]):
        """Zeros for the row of query tile ``i``."""
        words = cute.make_rmem_tensor(PIECE // 2, Int32)
        words.fill(0)
        for first in cutlass.range_constexpr(0, self.plan.head_dim_v, PIECE):
            self._put(i, first, words)

    def _put(self, i: int, first: int, words):
        values = cute.recast_tensor(words, self.staging.element_type)
        row = cute.zipped_divide(self.staging[None, None, i], (1, PIECE))
        target = row[(0, None), (self.thread, first // PIECE)]
        cute.autovec_copy(values, target)

    @cute.jit
    def store_lse(self, tile, i: cutlass.Constexpr[int], lse):
        """Write the LSE of the row, if it exists."""
        if cutlass.const_expr(self.outputs.lse is not None):
            position, head = self.bounds.place(tile, i * self.plan.row_tile + self.thread)
            if position < tile.q_rows:
                if cutlass.const_expr(self.plan.cu_seqlens_q):
                    self.outputs.lse[head, tile.q_begin + position] = lse
                else:
                    self.outputs.lse[tile.batch, head, position] = lse

    def exists(self, tile, i: int):
        """Whether the row is a query, not padding."""
        return self.bounds.position_in(tile, i * self.plan.row_tile + self.thread) < tile.q_len


@cute.jit
def correct(stream, corrector, ends):
    """Follow the tiles."""
    plan = corrector.plan
    stream, tile = next_tile(stream)
    while tile.row_block != END_OF_WORK:
        if tile.n_begin < tile.n_end:
            for i in cutlass.range_constexpr(plan.query_tiles):
                # The first product overwrites the output: it needs no factor.
                ends, _, _ = take(corrector, ends, i)
                ends = allow(ends, i)
            for _ in cutlass.range(tile.n_end - tile.n_begin - 1, unroll=1):
                for i in cutlass.range_constexpr(plan.query_tiles):
                    ends, factor, _ = take(corrector, ends, i)
                    if cutlass.const_expr(plan.score_stages > 1):
                        ends.of("output", i).wait()
                        ends.of("output", i).advance()
                    corrector.rescale(i, factor)
                    ends = allow(ends, i)
            for i in cutlass.range_constexpr(plan.query_tiles):
                ends = finish(corrector, tile, ends, i)
        elif cutlass.const_expr(plan.may_lack_keys):
            for i in cutlass.range_constexpr(plan.query_tiles):
                if cutlass.const_expr(plan.output_in_query):
                    ends.query.wait()
                ends.out.acquire()
                corrector.stage_zeros(i)
                ends = hand_over(ends)
                corrector.store_lse(tile, i, -Float32.inf)
        if cutlass.const_expr(plan.output_in_query):
            for _ in cutlass.range_constexpr(plan.query_tiles):
                ends.query.advance()
        stream, tile = next_tile(stream)


@cute.jit
def take(corrector, ends, i: cutlass.Constexpr[int]):
    """(ends, both statistics of this thread's row of query tile ``i``)."""
    statistics = ends.of("row_stats", i)
    statistics.wait()
    first = corrector.row_stats[i][corrector.thread, 0]
    second = corrector.row_stats[i][corrector.thread, 1]
    statistics.arrive_together()
    statistics.advance()
    return ends, first, second


@cute.jit
def allow(ends, i: cutlass.Constexpr[int]):
    """Let the next product add to the output of query tile ``i``."""
    tensor_memory.before_arrive()
    ends.of("rescaled", i).signal()
    ends.of("rescaled", i).advance()
    return ends


@cute.jit
def finish(corrector, tile, ends, i: cutlass.Constexpr[int]):
    """Normalise the output of query tile ``i`` and hand it to the storing role; write the LSE."""
    ends, total, row_max = take(corrector, ends, i)
    empty = total == 0.0
    exists = corrector.exists(tile, i)
    log2_sum = row_max * corrector.scale_log2 + cute.math.log2(total, fastmath=True)
    lse = log2_sum * math.LN_2 if exists and not empty else -Float32.inf
    ends.of("output", i).wait()
    ends.of("output", i).advance()
    tensor_memory.after_wait()
    ends.out.acquire()
    corrector.stage(i, Float32(0.0) if empty else cute.arch.rcp_approx(total), exists)
    ends = hand_over(ends)
    corrector.store_lse(tile, i, lse)
    return ends


@cute.jit
def hand_over(ends):
    """Say that this warp's rows are staged."""
    cute.arch.fence_view_async_shared()
    ends.out.signal()
    ends.out.advance()
    return ends
