"""The probability role: S and P of every step, and dV, by one warpgroup. dV lags a step behind S."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import mma
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.smem import transposed
from attn4.kernels.shared.softmax import to_operand
from attn4.kernels.shared.walk import Walk
from attn4.kernels.sm90.backward.elements import columns_at_once


class Probability(Fixed):
    """What the warpgroup keeps through the kernel; ``exchange`` takes P^T for the gradient role."""

    def __init__(self, elements, tiles, exchange, scale_log2):
        plan, dtype = elements.plan, elements.dtype
        self.plan = plan
        self.elements = elements
        self.exchange = exchange
        self.scale_log2 = scale_log2
        self.scores_mma = mma.tiled_product(dtype, 1, plan.tile_m, mma.K_MAJOR, mma.SHARED)
        self.dv_mma = mma.tiled_product(
            dtype, 1, columns_at_once(plan.head_dim_v), mma.MN_MAJOR, mma.REGISTERS
        )
        scores, dv = self.scores_mma.get_slice(0), self.dv_mma.get_slice(0)
        self.key = scores.make_fragment_A(scores.partition_A(tiles["key"]))[None, None, None, 0]
        self.query = scores.make_fragment_B(scores.partition_B(tiles["query"]))
        self.dout_t = dv.make_fragment_B(dv.partition_B(transposed(tiles["dout"])))
        shape = (mma.GROUP_THREADS // 2, plan.tile_m)
        self.probabilities = dv.make_fragment_A(dv.partition_shape_A(shape))
        self.dv = mma.accumulator(self.dv_mma, (shape[0], plan.head_dim_v))

    def start_scores(self, slot):
        """Issue S^T = K Q^T; returns its registers."""
        scores = mma.accumulator(self.scores_mma, (mma.GROUP_THREADS // 2, self.plan.tile_m))
        mma.start(self.scores_mma, scores, self.key, self.query[None, None, None, slot], zero=True)
        return scores

    def start_dv(self, slot):
        """Issue dV += P^T dO."""
        dout = self.dout_t[None, None, None, slot]
        mma.start(self.dv_mma, self.dv, self.probabilities, dout, zero=False)


@cute.jit
def run(worker, tile, group: Int32, ends):
    """All steps of a tile of keys; dV stays in registers."""
    worker.dv.fill(0.0)
    if tile.first < tile.last:
        walk = Walk(worker.plan, tile, group)
        ends.key.wait()
        scores = worker.start_scores(ends.query.wait())
        ends = exponentiate(worker, walk, ends, scores, 0)
        ends = hand_over(worker, ends, scores)
        for _ in cutlass.range(walk.steps - 1, unroll=1):
            walk = walk.following()
            ends = step(worker, walk, ends)
        ends.key.arrive()
        ends.key.advance()
        worker.start_dv(ends.dout.wait())
        mma.wait(0)
        ends = release_dout(ends)
    return ends


@cute.jit
def step(worker, walk, ends):
    """Of the step ``walk`` S and P, beside dV of the one before it."""
    if cutlass.const_expr(ends.dout.ring.channel.stages > 1):
        scores = worker.start_scores(ends.query.wait())
        worker.start_dv(ends.dout.wait())
        ends = exponentiate(worker, walk, ends, scores, 1)
        mma.wait(0)
        ends = release_dout(ends)
    else:
        # The only slot of dO comes back as early as it can.
        worker.start_dv(ends.dout.wait())
        scores = worker.start_scores(ends.query.wait())
        mma.wait(1)
        ends = release_dout(ends)
        ends = exponentiate(worker, walk, ends, scores, 0)
    return hand_over(worker, ends, scores)


def release_dout(ends):
    """Give back the slot of dO of the step whose dV is complete."""
    ends.dout.arrive()
    ends.dout.advance()
    return ends


@cute.jit
def exponentiate(worker, walk, ends, scores, younger: cutlass.Constexpr[int]):
    """P of a step from its scores, beside ``younger`` products that began after them."""
    slot = ends.row_stats.wait()
    mma.wait(younger)
    ends.query.arrive()
    ends.query.advance()
    worker.elements.exponentiate(scores, worker.scale_log2, walk, slot)
    ends.row_stats.advance()
    return ends


@cute.jit
def hand_over(worker, ends, probabilities):
    """Round P for dV, and store it for dS."""
    to_operand(probabilities, worker.probabilities)
    worker.exchange.write(worker.probabilities, ends.probabilities.index)
    ends.probabilities.signal()
    ends.probabilities.advance()
    return ends
