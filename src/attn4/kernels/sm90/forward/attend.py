"""The attending role: both products, the online softmax and the output, by two or three warpgroups.

Within a warpgroup the product of the next scores runs while the softmax of the current ones is computed;
between warpgroups, ``turn`` lets one issue products while the other takes exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import mma
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.shared.masking import apply_mask
from attn4.kernels.shared.softmax import OnlineSoftmax, to_operand
from attn4.kernels.shared.tiles import END_OF_WORK, TileRecord

GROUP_THREADS = 128


@dataclass(frozen=True)
class Operands:
    """The two products of a warpgroup: S = Q K^T from shared memory, O += P V with P in registers."""

    scores_mma: cute.TiledMma
    output_mma: cute.TiledMma
    query: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    probabilities: cute.Tensor


def operands(plan, scores_mma, output_mma, group: Int32, shared) -> Operands:
    """Partition the shared tiles for warpgroup ``group``."""
    query, key, value_t = shared
    scores_slice = scores_mma.get_slice(group * GROUP_THREADS)
    output_slice = output_mma.get_slice(group * GROUP_THREADS)
    return Operands(
        scores_mma,
        output_mma,
        scores_slice.make_fragment_A(scores_slice.partition_A(query)),
        scores_slice.make_fragment_B(scores_slice.partition_B(key)),
        output_slice.make_fragment_B(output_slice.partition_B(value_t)),
        output_slice.make_fragment_A(output_slice.partition_shape_A((plan.tile_m, plan.tile_n))),
    )


class Attend(Fixed):
    """One warpgroup's view of a tile: what stays fixed while its key blocks pass."""

    def __init__(self, plan, ops: Operands, softmax: OnlineSoftmax, turn, bounds, rows):
        self.plan = plan
        self.ops = ops
        self.softmax = softmax
        self.turn = turn
        self.bounds = bounds
        self.rows = rows
        self.output = mma.accumulator(ops.output_mma, (plan.tile_m, plan.head_dim_v))
        self.early_rescale = plan.head_dim_v > 128

    @cute.jit
    def first(self, tile, key_in):
        """Scores and softmax of the last key block, where every kind of mask applies."""
        plan = self.plan
        slot = key_in.wait()
        scores = mma.accumulator(self.ops.scores_mma, (plan.tile_m, plan.tile_n))
        mma.start(
            self.ops.scores_mma,
            scores,
            self.ops.query[None, None, None, 0],
            self.ops.key[None, None, None, slot],
            zero=True,
        )
        self.output.fill(0.0)
        mma.wait(0)
        key_in.arrive()
        key_in.advance()
        apply_mask(scores, self.bounds, tile, self.rows, tile.n_end - 1)
        self.softmax.first(scores)
        to_operand(scores, self.ops.probabilities)
        return key_in

    @cute.jit
    def step(self, tile, block: Int32, key_in, value_in, masked: cutlass.Constexpr[bool]):
        """Scores of ``block`` and the output of the block before it, overlapped."""
        plan = self.plan
        key_slot = key_in.wait()
        self.turn.take()
        scores = mma.accumulator(self.ops.scores_mma, (plan.tile_m, plan.tile_n))
        mma.start(
            self.ops.scores_mma,
            scores,
            self.ops.query[None, None, None, 0],
            self.ops.key[None, None, None, key_slot],
            zero=True,
        )
        if cutlass.const_expr(self.early_rescale):
            self.softmax.apply_rescale(self.output)
        value_slot = value_in.wait()
        self._accumulate(value_slot)
        self.turn.give()
        mma.wait(1)
        key_in.arrive()
        key_in.advance()
        if cutlass.const_expr(masked):
            apply_mask(scores, self.bounds, tile, self.rows, block)
        self.softmax.update(scores, masked)
        mma.wait(0)
        value_in.arrive()
        value_in.advance()
        to_operand(scores, self.ops.probabilities)
        if cutlass.const_expr(not self.early_rescale):
            self.softmax.apply_rescale(self.output)
        return key_in, value_in

    @cute.jit
    def last(self, value_in):
        """The output of the first key block, the last to be visited."""
        if cutlass.const_expr(self.early_rescale):
            self.softmax.apply_rescale(self.output)
        slot = value_in.wait()
        self._accumulate(slot)
        mma.wait(0)
        value_in.arrive()
        value_in.advance()
        return value_in

    def _accumulate(self, slot):
        mma.start(
            self.ops.output_mma,
            self.output,
            self.ops.probabilities,
            self.ops.value[None, None, None, slot],
            zero=False,
        )

    @cute.jit
    def blocks(self, tile, key_in, value_in):
        """All key blocks of a tile but the first visited: masked ones on the right, free ones, masked on the left."""
        free_begin, free_end = self.bounds.unmasked(tile)
        block = tile.n_end - 2
        if cutlass.const_expr(self.bounds.kind != "full"):
            stop = cutlass.max(free_end, tile.n_begin)
            for _ in cutlass.range(block - stop + 1, unroll=1):
                key_in, value_in = self.step(tile, block, key_in, value_in, masked=True)
                block -= 1
        stop = tile.n_begin
        if cutlass.const_expr(self.bounds.kind == "window"):
            stop = cutlass.max(free_begin, tile.n_begin)
        for _ in cutlass.range(block - stop + 1, unroll=1):
            key_in, value_in = self.step(tile, block, key_in, value_in, masked=False)
            block -= 1
        if cutlass.const_expr(self.bounds.kind == "window"):
            for _ in cutlass.range(block - tile.n_begin + 1, unroll=1):
                key_in, value_in = self.step(tile, block, key_in, value_in, masked=True)
                block -= 1
        return key_in, value_in


@cute.jit
def attend(worker, tiles, store, channels):
    """Follow the announced tiles."""
    announced, query_in, key_in, value_in = channels
    worker.turn.open()
    announced.wait()
    tile = TileRecord.read(tiles.words)
    cute.arch.sync_warp()
    announced.arrive()
    announced.advance()
    while tile.row_block != END_OF_WORK:
        worker.softmax.empty()
        if tile.n_begin < tile.n_end:
            query_in.wait()
            key_in = worker.first(tile, key_in)
            key_in, value_in = worker.blocks(tile, key_in, value_in)
            query_in.arrive()
            query_in.advance()
            value_in = worker.last(value_in)
        else:
            worker.output.fill(0.0)
        lse = worker.softmax.finish(worker.output)
        store(tile, worker.output, lse, worker.rows)
        announced.wait()
        tile = TileRecord.read(tiles.words)
        cute.arch.sync_warp()
        announced.arrive()
        announced.advance()
    worker.turn.close()
