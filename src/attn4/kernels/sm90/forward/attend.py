"""The attending role: both products, the online softmax and the output, by the warpgroups of the plan.

Within a warpgroup the scores of a block are issued just before the output of the block before it, and the
softmax runs beside that output; between warpgroups, ``turn`` lets one issue products while another takes
exponentials. Where the plan has an early start, the first scores of a tile are issued beside the last output
product of the tile before it, and computed while that is stored. Blocks of which no row of the warpgroup
sees a key, on either side, are only handed on.
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
        # Where a tile has more rows than a block has keys, a warpgroup passes over some blocks by itself.
        self.parted = plan.tile_m > plan.tile_n
        self.group_rows = mma.group_rows(turn.group) if self.parted else (0, plan.tile_m - 1)
        self.scores = mma.accumulator(ops.scores_mma, (plan.tile_m, plan.tile_n))
        self.output = mma.accumulator(ops.output_mma, (plan.tile_m, plan.head_dim_v))
        # With a threshold the softmax rescales the output itself, where a maximum moves.
        self.lazy_rescale = plan.softmax.rescale_threshold > 0
        # A wide output takes long to rescale: better beside the score product than after it.
        self.early_rescale = not self.lazy_rescale and plan.head_dim_v > 128

    def start_scores(self, query_in, slot):
        """Issue S = Q K^T for the keys in ``slot``."""
        query = self.ops.query
        if not self.plan.query_in_registers:
            query = query[None, None, None, query_in.index if query_in.ring.channel.stages > 1 else 0]
        key = self.ops.key[None, None, None, slot]
        mma.start(self.ops.scores_mma, self.scores, query, key, zero=True)

    def start_output(self, slot):
        """Issue O += P V for the values in ``slot``."""
        value = self.ops.value[None, None, None, slot]
        mma.start(self.ops.output_mma, self.output, self.ops.probabilities, value, zero=False)

    @cute.jit
    def begin(self, tile, query_in, key_in, value_in):
        """The scores of the first key block that this warpgroup sees, awaited."""
        if cutlass.const_expr(self.bounds.kind != "full"):
            _, end = self._met(tile)
            key_in, value_in = self._pass_over(tile.n_end - end, key_in, value_in)
        query_in = self._take_query(query_in)
        slot = key_in.wait()
        self.start_scores(query_in, slot)
        mma.wait(0)
        key_in.arrive()
        key_in.advance()
        return query_in, key_in, value_in

    @cute.jit
    def _take_query(self, query_in):
        query_in.wait()
        if cutlass.const_expr(self.plan.query_in_registers):
            self.ops.load_query()
            query_in.arrive()
            query_in.advance()
        return query_in

    @cute.jit
    def run(self, tile, query_in, key_in, value_in):
        """All key blocks of a tile, masked ones on the right, free ones, masked ones left: from the first
        scores on, which ``begin`` has given, to the last output product, which ``finish`` issues.
        """
        bounds = self.bounds
        begin, end = self._met(tile)
        self._first(tile, end - 1)
        free_begin, free_end = bounds.unmasked(tile, self.group_rows)
        block = end - 2
        if cutlass.const_expr(bounds.kind != "full"):
            stop = cutlass.max(free_end, begin)
            for _ in cutlass.range(block - stop + 1, unroll=1):
                key_in, value_in = self._step((tile, block), query_in, key_in, value_in, masked=True)
                block -= 1
        stop = begin
        if cutlass.const_expr(bounds.kind == "window"):
            stop = cutlass.max(free_begin, begin)
        for _ in cutlass.range(block - stop + 1, unroll=1):
            key_in, value_in = self._step((tile, block), query_in, key_in, value_in, masked=False)
            block -= 1
        if cutlass.const_expr(bounds.kind == "window"):
            for _ in cutlass.range(block - begin + 1, unroll=1):
                key_in, value_in = self._step((tile, block), query_in, key_in, value_in, masked=True)
                block -= 1
        if cutlass.const_expr(not self.plan.query_in_registers):
            query_in.arrive()
            query_in.advance()
        if cutlass.const_expr(self.early_rescale):
            self.softmax.apply_rescale(self.output)
        return query_in, key_in, value_in

    @cute.jit
    def finish(self, tile, key_in, value_in):
        """The last product of a tile."""
        slot = value_in.wait()
        self.start_output(slot)
        mma.wait(0)
        value_in.arrive()
        value_in.advance()
        if cutlass.const_expr(self.bounds.kind == "window"):
            begin, _ = self._met(tile)
            key_in, value_in = self._pass_over(begin - tile.n_begin, key_in, value_in)
        return key_in, value_in

    def _met(self, tile):
        """Key blocks [first, last) that are not passed over."""
        return self.bounds.met(tile, self.group_rows) if self.parted else (tile.n_begin, tile.n_end)

    @cute.jit
    def _pass_over(self, blocks: Int32, key_in, value_in):
        """Hand on some key blocks unread, and the turns that go with them."""
        if cutlass.const_expr(not self.parted):
            return key_in, value_in
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
    def _first(self, tile, block: Int32):
        scores = self.scores
        whole = tile.n_end * self.plan.tile_n <= tile.k_len
        if cutlass.const_expr(self.bounds.kind != "full" or self.plan.seqused_q):
            whole = cutlass.Boolean(False)
        if not whole:
            apply_mask(scores, self.bounds, tile, self.rows, block)
        self.softmax.first(scores)
        to_operand(scores, self.ops.probabilities)

    @cute.jit
    def _step(self, place, query_in, key_in, value_in, masked: cutlass.Constexpr[bool]):
        tile, block = place
        key_slot = key_in.wait()
        if cutlass.const_expr(self.lazy_rescale):
            # Behind the scores' product the wait would not be answered before that has begun.
            value_slot = value_in.wait()
        self.turn.take()
        scores = self.scores
        self.start_scores(query_in, key_slot)
        if cutlass.const_expr(self.early_rescale):
            self.softmax.apply_rescale(self.output)
        if cutlass.const_expr(not self.lazy_rescale):
            value_slot = value_in.wait()
        self.start_output(value_slot)
        self.turn.give()
        mma.wait(1)
        if cutlass.const_expr(not self.plan.late_release):
            key_in.arrive()
        if cutlass.const_expr(masked):
            apply_mask(scores, self.bounds, tile, self.rows, block)
        self.softmax.update(scores, self.output, masked)
        if cutlass.const_expr(self.plan.late_release):
            key_in.arrive(self.softmax.done())
        key_in.advance()
        mma.wait(0)
        value_in.arrive()
        value_in.advance()
        to_operand(scores, self.ops.probabilities)
        if cutlass.const_expr(not self.lazy_rescale and not self.early_rescale):
            self.softmax.apply_rescale(self.output)
        return key_in, value_in

    def normalise_and_store(self, tile, store):
        """Normalise the output of ``tile`` and write it."""
        lse = self.softmax.finish(self.output)
        if cutlass.const_expr(self.plan.seqused_q):
            # Rows past the queries went through unmasked blocks with whatever was stored there.
            clear_rows(
                self.output, lse, [self.bounds.position_in(tile, row) < tile.q_len for row in self.rows]
            )
        store(tile, self.output, lse, self.rows)

    @cute.jit
    def follows(self, tile, following):
        """Whether the first scores of ``following`` come next after the last product of ``tile``: both have
        key blocks, and this warpgroup passes over none between.
        """
        if cutlass.const_expr(not self.plan.early_start):
            return cutlass.Boolean(False)
        begin, _ = self._met(tile)
        _, end = self._met(following)
        more = following.row_block != END_OF_WORK and following.n_begin < following.n_end
        return more and tile.n_begin < tile.n_end and begin == tile.n_begin and end == following.n_end

    @cute.jit
    def finish_and_begin(self, tile, store, query_in, key_in, value_in):
        """`finish` and store ``tile``, and beside both `begin` the next."""
        query_in = self._take_query(query_in)
        value_slot = value_in.wait()
        key_slot = key_in.wait()
        self.start_output(value_slot)
        self.start_scores(query_in, key_slot)
        mma.wait(1)
        value_in.arrive()
        value_in.advance()
        self.normalise_and_store(tile, store)
        mma.wait(0)
        key_in.arrive()
        key_in.advance()
        return query_in, key_in, value_in


@cute.jit
def attend(stream, worker, store, channels):
    """Follow the announced tiles."""
    query_in, key_in, value_in = channels
    worker.turn.open()
    stream, tile = next_tile(stream)
    begun = cutlass.Boolean(False)
    while tile.row_block != END_OF_WORK:
        worker.softmax.empty()
        worker.output.fill(0.0)
        some_keys = tile.n_begin < tile.n_end
        if some_keys:
            if not begun:
                query_in, key_in, value_in = worker.begin(tile, query_in, key_in, value_in)
            query_in, key_in, value_in = worker.run(tile, query_in, key_in, value_in)
        stream, following = next_tile(stream)
        begun = worker.follows(tile, following)
        if begun:
            query_in, key_in, value_in = worker.finish_and_begin(tile, store, query_in, key_in, value_in)
        else:
            if some_keys:
                key_in, value_in = worker.finish(tile, key_in, value_in)
            worker.normalise_and_store(tile, store)
        tile = following
    worker.turn.close()
