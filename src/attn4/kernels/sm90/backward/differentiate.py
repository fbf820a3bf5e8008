"""The differentiating role: all five products, P and dS between them, by two warpgroups of 64 keys each.

A step works on one block of queries. Its products are issued in two batches, for which the warpgroups take
turns: the next S, the last dQ and dK, in one of two orders; then dV and dP. So one warpgroup's P or dS is
made beside the other's products. dQ lags a step behind, as it needs dS of both. P^T and dS^T never leave the
registers for dV and dK.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import math, mma
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.smem import store_matrices, swizzled_address, transposed
from attn4.kernels.dsl.staging import by_matrices
from attn4.kernels.shared.key_tiles import key_tile
from attn4.kernels.shared.softmax import to_operand
from attn4.kernels.shared.stream import next_tile
from attn4.kernels.shared.tiles import END_OF_WORK
from attn4.kernels.shared.walk import Walk
from attn4.kernels.sm90.backward import dk_first, scores_first
from attn4.kernels.sm90.backward.elements import PAIR, NearElements
from attn4.kernels.sm90.backward.steps import announce, give_turn, take_turn


class Operands(Fixed):
    """The five products and the fragments of their operands, by slot where there are slots."""

    def __init__(self, plan, dtype, groups: int, thread, tiles):
        self.plan = plan
        self.dtype = dtype
        self.thread = thread
        key, value, query, dout, dscores = (
            tiles[name] for name in ("key", "value", "query", "dout", "dscores")
        )
        m, n = plan.tile_m, plan.tile_n
        self.scores_mma = mma.tiled_product(dtype, groups, m, mma.K_MAJOR, mma.SHARED)
        self.dv_mma = mma.tiled_product(dtype, groups, plan.head_dim_v, mma.MN_MAJOR, mma.REGISTERS)
        self.dk_mma = mma.tiled_product(dtype, groups, plan.head_dim, mma.MN_MAJOR, mma.REGISTERS)
        over = (groups, 1) if mma.rows_split(m, groups) else (1, groups)
        self.dq_mma = mma.tiled_product(
            dtype, over, plan.head_dim // over[1], mma.MN_MAJOR, mma.SHARED, a_major=mma.MN_MAJOR
        )
        first = cute.arch.make_warp_uniform(thread // mma.GROUP_THREADS) * mma.GROUP_THREADS
        scores, dv, dk, dq = (
            product.get_slice(first) for product in (self.scores_mma, self.dv_mma, self.dk_mma, self.dq_mma)
        )
        self.key = scores.make_fragment_A(scores.partition_A(key))
        self.value = scores.make_fragment_A(scores.partition_A(value))[None, None, None, 0]
        self.query = scores.make_fragment_B(scores.partition_B(query))
        self.dout = scores.make_fragment_B(scores.partition_B(dout))
        self.query_t = dk.make_fragment_B(dk.partition_B(transposed(query)))
        self.dout_t = dv.make_fragment_B(dv.partition_B(transposed(dout)))
        self.dscores_t = dq.make_fragment_A(dq.partition_A(transposed(dscores)))
        self.key_t = dq.make_fragment_B(dq.partition_B(transposed(key)))
        self.probabilities = dv.make_fragment_A(dv.partition_shape_A((n, m)))
        self.dscores = dk.make_fragment_A(dk.partition_shape_A((n, m)))
        self.dscores_tile = dscores
        _, mine = by_matrices(self.scores_mma, thread, dtype)
        self.dscores_rows = swizzled_address(mine.partition_D(dscores[None, None, 0]))


class Worker(Fixed):
    """What a warpgroup keeps through the kernel; ``stats`` as of `Elements`."""

    def __init__(self, ops: Operands, bounds, lengths, scale_log2, stats, turn):
        self.plan = ops.plan
        self.ops = ops
        self.lengths = lengths
        self.scale_log2 = scale_log2
        self.elements = NearElements(ops.plan, ops.dtype, (bounds, 0), ops.thread, stats)
        self.turn = turn
        self.order = scores_first if ops.plan.scores_first else dk_first
        self.dv = mma.accumulator(ops.dv_mma, (self.plan.tile_n, self.plan.head_dim_v))
        self.dk = mma.accumulator(ops.dk_mma, (self.plan.tile_n, self.plan.head_dim))

    def start_scores(self, key_slot, slot):
        """Issue S^T = K Q^T; returns its registers."""
        return self._start_square(
            self.ops.key[None, None, None, key_slot], self.ops.query[None, None, None, slot]
        )

    def start_dprobabilities(self, slot):
        """Issue dP^T = V dO^T; returns its registers."""
        return self._start_square(self.ops.value, self.ops.dout[None, None, None, slot])

    def _start_square(self, a, b):
        values = mma.accumulator(self.ops.scores_mma, (self.plan.tile_n, self.plan.tile_m))
        mma.start(self.ops.scores_mma, values, a, b, zero=True)
        return values

    def start_dv(self, slot, zero: bool = False):
        """Issue dV += P^T dO."""
        ops = self.ops
        mma.start(ops.dv_mma, self.dv, ops.probabilities, ops.dout_t[None, None, None, slot], zero=zero)

    def start_dk(self, slot):
        """Issue dK += dS^T Q."""
        ops = self.ops
        mma.start(ops.dk_mma, self.dk, ops.dscores, ops.query_t[None, None, None, slot], zero=False)

    def start_dq(self, slot, key_slot):
        """Issue dQ = dS K, of both warpgroups' keys; returns its registers."""
        ops = self.ops
        dq = mma.accumulator(ops.dq_mma, (self.plan.tile_m, self.plan.head_dim))
        dscores, key = ops.dscores_t[None, None, None, slot], ops.key_t[None, None, None, key_slot]
        mma.start(ops.dq_mma, dq, dscores, key, zero=True)
        return dq

    @property
    def pairs(self) -> int:
        """Pairs of queries of a step that a thread has."""
        return self.elements.pairs

    def exponentiate(self, scores, pair: int, lse):
        """P^T of one pair of queries, rounded for dV."""
        by_row = mma.by_row(scores)
        words = cute.recast_tensor(self.ops.probabilities, Int32)
        for half in range(2):
            both = [
                cute.math.exp2(by_row[half, PAIR * pair + i] * self.scale_log2 + lse[i], fastmath=True)
                for i in range(PAIR)
            ]
            words[2 * pair + half] = math.pack(*both, self.ops.dtype)

    def exponentiated(self, pairs: int):
        """A zero that is known when P^T of so many pairs is."""
        words = cute.recast_tensor(self.ops.probabilities, Int32)
        return math.zero_of_all([words[i] for i in range(2 * pairs)])

    @cute.jit
    def differentiate(self, dprobabilities, delta: cutlass.Constexpr):
        """dS^T = P^T (dP^T - delta), rounded, in registers; ``delta`` by pair."""
        words = cute.recast_tensor(self.ops.probabilities, Int32)
        if cutlass.const_expr(self.plan.packed_dscores):
            dscores = cute.recast_tensor(self.ops.dscores, Int32)
            self.elements.differentiate_packed(dprobabilities, words, delta, dscores)
        else:
            self.elements.differentiate(dprobabilities, words, delta)
            to_operand(dprobabilities, self.ops.dscores)

    def share(self, slot):
        """Write dS^T of this warpgroup's keys to shared memory, to be announced."""
        plan = self.plan
        first = self.ops.dscores_rows + slot * (2 * plan.tile_n * plan.tile_m)
        words = cute.recast_tensor(self.ops.dscores, Int32)
        for number in range(cute.size(words) // 4):
            swizzle, part = divmod(number, 4)
            address = first ^ (32 * part) if part else first
            store_matrices(address, swizzle * plan.tile_n * 128, [words[4 * number + i] for i in range(4)])


@cute.jit
def differentiate(stream, worker, outlet, ends):
    """One announced tile after another."""
    worker.turn.open()
    stream, record = next_tile(stream)
    while record.row_block != END_OF_WORK:
        ends = run(worker, outlet, key_tile(record, stream.order), ends)
        stream, record = next_tile(stream)
    worker.turn.close()


@cute.jit
def run(worker, outlet, tile, ends):
    """All steps of a tile, and its results.

    A dS of zeros stands for the step before the first: a product of zeros, where the loop would else need a
    second body.
    """
    worker.dk.fill(0.0)
    if tile.first < tile.last:
        walk = Walk(worker.plan, tile, worker.lengths.group)
        before = walk.before()
        sums = outlet.sums(tile)
        worker.ops.dscores.fill(0)
        worker.share(ends.shared.index)
        ends = announce(ends)
        ends = worker.order.begin(worker, walk, ends)
        for _ in cutlass.range(walk.steps - 1, unroll=1):
            walk, before, ends = worker.order.step(worker, walk, before, sums, ends)
        ends = finish(worker, outlet, walk, before, sums, ends)
    else:
        worker.dv.fill(0.0)
        outlet.store_dv(tile, ends.shared.index)
    outlet.store_dk(tile, ends.shared.index)
    return ends


@cute.jit
def finish(worker, outlet, walk, before, sums, ends):
    """Of the last step dK, of the last two dQ; and dV, which is complete, to where it goes."""
    ends.value.arrive()
    ends.value.advance()
    ends, dq = worker.order.last(worker, ends)
    ends.dscores.advance()
    outlet.store_dv(walk.tile, ends.shared.index)
    ends = take_turn(worker, ends)
    mma.wait(0)
    sums.add(dq, before)
    ends = give_turn(worker, ends)
    ends.query.arrive()
    ends.query.advance()
    dq = worker.start_dq(ends.dscores.wait(), ends.key.index)
    ends.dscores.advance()
    ends = take_turn(worker, ends)
    mma.wait(0)
    ends.key.arrive()
    ends.key.advance()
    sums.add(dq, walk)
    return give_turn(worker, ends)
