"""The attending role: both products, the online softmax and the output, by the warpgroups of the plan.

Within a warpgroup the scores of a block are issued just before the output of the block before it, and the
softmax runs beside that output; between warpgroups, ``turn`` lets one issue products while another takes
exponentials.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import mma
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.shared.masking import apply_mask
from attn4.kernels.shared.softmax import OnlineSoftmax, clear_rows, to_operand
from attn4.kernels.shared.stream import next_tile
from attn4.kernels.shared.tiles import END_OF_WORK
from attn4.kernels.sm90.forward.operands import Operands


class Worker(Fixed):
    """What a warpgroup keeps through the whole kernel, and how key blocks pass through it."""

    def __init__(self, plan, ops: Operands, softmax: OnlineSoftmax, turn, bounds, rows):
        self.plan = plan
        self.ops = ops
        self.softmax = softmax
        self.turn = turn
        self.bounds = bounds
        self.rows = rows
        self.group_rows = mma.group_rows(turn.group)
        self.output = mma.accumulator(ops.output_mma, (plan.tile_m, plan.head_dim_v))
        # A wide output takes long to rescale: better beside the score product than after it.
        self.early_rescale = plan.head_dim_v > 128

    def start_scores(self, slot):
        """Issue S = Q K^T for the keys in ``slot``; returns its registers."""
        scores = mma.accumulator(self.ops.scores_mma, (self.plan.tile_m, self.plan.tile_n))
        mma.start(
            self.ops.scores_mma, scores, self.ops.query, self.ops.key[None, None, None, slot], zero=True
        )
        return scores

    def start_output(self, slot):
        """Issue O += P V for the values in ``slot``."""
        value = self.ops.value[None, None, None, slot]
        mma.start(self.ops.output_mma, self.output, self.ops.probabilities, value, zero=False)

    @cute.jit
    def run(self, tile, query_in, key_in, value_in):
        """All key blocks of a tile: the last, then masked ones on the right, free ones, masked ones left.

        Blocks of which no row of this warpgroup sees a key, on either side, are only handed on.
        """
        bounds = self.bounds
        begin, end = bounds.met(tile, self.group_rows)
        if cutlass.const_expr(bounds.kind != "full"):
            key_in, value_in = self._pass_over(tile.n_end - end, key_in, value_in)
        key_in = self._first(tile, end - 1, key_in)
        free_begin, free_end = bounds.unmasked(tile, self.group_rows)
        block = end - 2
        if cutlass.const_expr(bounds.kind != "full"):
            stop = cutlass.max(free_end, begin)
            for _ in cutlass.range(block - stop + 1, unroll=1):
                key_in, value_in = self._step(tile, block, key_in, value_in, masked=True)
                block -= 1
        stop = begin
        if cutlass.const_expr(bounds.kind == "window"):
            stop = cutlass.max(free_begin, begin)
        for _ in cutlass.range(block - stop + 1, unroll=1):
            key_in, value_in = self._step(tile, block, key_in, value_in, masked=False)
            block -= 1
        if cutlass.const_expr(bounds.kind == "window"):
            for _ in cutlass.range(block - begin + 1, unroll=1):
                key_in, value_in = self._step(tile, block, key_in, value_in, masked=True)
                block -= 1
        if cutlass.const_expr(not self.plan.query_in_registers):
            query_in.arrive()
        query_in.advance()
        value_in = self._last(value_in)
        if cutlass.const_expr(bounds.kind == "window"):
            key_in, value_in = self._pass_over(begin - tile.n_begin, key_in, value_in)
        return query_in, key_in, value_in

    @cute.jit
    def _pass_over(self, blocks: Int32, key_in, value_in):
        """Hand on some key blocks unread, and the turns that go with them."""
        for _ in cutlass.range(blocks, unroll=1):
            key_in.wait()
            key_in.arrive()
            key_in.advance()
            self.turn.take()
            self.turn.give()
            value_in.wait()
            value_in.arrive()
            value_in.advance()
        return key_in, value_in

    @cute.jit
    def _first(self, tile, block: Int32, key_in):
        slot = key_in.wait()
        scores = self.start_scores(slot)
        mma.wait(0)
        key_in.arrive()
        key_in.advance()
        whole = tile.n_end * self.plan.tile_n <= tile.k_len
        if cutlass.const_expr(self.bounds.kind != "full" or self.plan.seqused_q):
            whole = cutlass.Boolean(False)
        if not whole:
            apply_mask(scores, self.bounds, tile, self.rows, block)
        self.softmax.first(scores)
        to_operand(scores, self.ops.probabilities)
        return key_in

    @cute.jit
    def _step(self, tile, block: Int32, key_in, value_in, masked: cutlass.Constexpr[bool]):
        key_slot = key_in.wait()
        self.turn.take()
        scores = self.start_scores(key_slot)
        if cutlass.const_expr(self.early_rescale):
            self.softmax.apply_rescale(self.output)
        value_slot = value_in.wait()
        self.start_output(value_slot)
        self.turn.give()
        mma.wait(1)
        if cutlass.const_expr(not self.plan.late_release):
            key_in.arrive()
        if cutlass.const_expr(masked):
            apply_mask(scores, self.bounds, tile, self.rows, block)
        self.softmax.update(scores, masked)
        if cutlass.const_expr(self.plan.late_release):
            key_in.arrive(self.softmax.done())
        key_in.advance()
        mma.wait(0)
        value_in.arrive()
        value_in.advance()
        to_operand(scores, self.ops.probabilities)
        if cutlass.const_expr(not self.early_rescale):
            self.softmax.apply_rescale(self.output)
        return key_in, value_in

    @cute.jit
    def _last(self, value_in):
        if cutlass.const_expr(self.early_rescale):
            self.softmax.apply_rescale(self.output)
        slot = value_in.wait()
        self.start_output(slot)
        mma.wait(0)
        value_in.arrive()
        value_in.advance()
        return value_in


@cute.jit
def attend(stream, worker, store, channels):
    """Follow the announced tiles."""
    query_in, key_in, value_in = channels
    worker.turn.open()
    stream, tile = next_tile(stream)
    while tile.row_block != END_OF_WORK:
        worker.softmax.empty()
        worker.output.fill(0.0)
        if tile.n_begin < tile.n_end:
            query_in.wait()
            if cutlass.const_expr(worker.plan.query_in_registers):
                worker.ops.load_query()
                query_in.arrive()
            query_in, key_in, value_in = worker.run(tile, query_in, key_in, value_in)
        lse = worker.softmax.finish(worker.output)
        if cutlass.const_expr(worker.plan.seqused_q):
            # Rows past the queries went through unmasked blocks with whatever was stored there.
            clear_rows(
                worker.output, lse, [worker.bounds.position_in(tile, row) < tile.q_len for row in worker.rows]
            )
        store(tile, worker.output, lse, worker.rows)
        stream, tile = next_tile(stream)
    worker.turn.close()
