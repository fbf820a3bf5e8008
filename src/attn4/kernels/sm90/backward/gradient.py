"""The gradient role: dP and dS of every step, and dK, by one warpgroup. dK lags a step behind dP."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import bulk, mma
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.smem import transposed
from attn4.kernels.dsl.staging import by_matrices
from attn4.kernels.shared.softmax import to_operand
from attn4.kernels.sm90.backward.elements import Statistics, columns_at_once


class Sender(Fixed):
    """Copies dS^T to the other CTA of a cluster: a slot holds first a CTA's own rows, then the other's.

    A warp copies the 16 rows that it has written.
    """

    def __init__(self, plan, words, cluster, thread):
        buffer = plan.buffer("dscores")
        self.ctas = cluster.size
        self.peer = 1 - cluster.rank
        self.words = words
        self.slot_words = buffer.size // buffer.stages // 4
        self.own_words = self.slot_words // cluster.size
        self.warp = cute.arch.make_warp_uniform(thread // cute.arch.WARP_SIZE)

    @cute.jit
    def send(self, end):
        """Start the copy, after the rows are written and fenced; ``end`` is at their slot."""
        count = self.own_words // (mma.GROUP_THREADS // cute.arch.WARP_SIZE)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            source = self.words + (end.index * self.slot_words + self.warp * count)
            bulk.send(self.peer, source + self.own_words, source, 4 * count, end.barrier)


class Gradient(Fixed):
    """What the warpgroup keeps through the kernel; ``exchange`` holds P^T of the probability role."""

    def __init__(self, elements, tiles, exchange, sender):
        plan, dtype = elements.plan, elements.dtype
        self.plan = plan
        self.elements = elements
        self.exchange = exchange
        self.sender = sender
        self.square_mma = mma.tiled_product(dtype, 1, plan.tile_m, mma.K_MAJOR, mma.SHARED)
        self.dk_mma = mma.tiled_product(dtype, 1, columns_at_once(plan.head_dim), mma.MN_MAJOR, mma.REGISTERS)
        square, dk = self.square_mma.get_slice(0), self.dk_mma.get_slice(0)
        self.value = square.make_fragment_A(square.partition_A(tiles["value"]))[None, None, None, 0]
        self.dout = square.make_fragment_B(square.partition_B(tiles["dout"]))
        self.query_t = dk.make_fragment_B(dk.partition_B(transposed(tiles["query"])))
        self.shape = (mma.GROUP_THREADS // 2, plan.tile_m)
        self.dscores = dk.make_fragment_A(dk.partition_shape_A(self.shape))
        slots = plan.buffer("dscores").stages
        self.dscores_tile = cute.local_tile(tiles["dscores"], (*self.shape, slots), (0, 0, 0))
        self.dk = mma.accumulator(self.dk_mma, (self.shape[0], plan.head_dim))

    def start_dprobabilities(self, slot):
        """Issue dP^T = V dO^T; returns its registers."""
        values = mma.accumulator(self.square_mma, self.shape)
        mma.start(self.square_mma, values, self.value, self.dout[None, None, None, slot], zero=True)
        return values

    def start_dk(self, slot):
        """Issue dK += dS^T Q."""
        mma.start(self.dk_mma, self.dk, self.dscores, self.query_t[None, None, None, slot], zero=False)

    @cute.jit
    def share(self, slot):
        """Write dS^T to shared memory, where products of another warpgroup read it."""
        atom, mine = by_matrices(self.square_mma, self.elements.thread, self.elements.dtype)
        shape = self.square_mma.partition_shape_C(self.shape)
        rounded = cute.make_tensor(self.dscores.iterator, cute.make_layout(shape))
        cute.copy(atom, mine.retile(rounded), mine.partition_D(self.dscores_tile[None, None, slot]))
        cute.arch.fence_view_async_shared()


@cute.jit
def run(worker, tile, group: Int32, ends):
    """All steps of a tile of keys; dK, not yet scaled, stays in registers."""
    worker.dk.fill(0.0)
    if tile.first < tile.last:
        ends.value.wait()
        dprobabilities = worker.start_dprobabilities(ends.dout.wait())
        mma.wait(0)
        ends = differentiate(worker, ends, dprobabilities)
        ends = hand_over(worker, ends, dprobabilities)
        for _ in cutlass.range((tile.last - tile.first) * group - 1, unroll=1):
            ends = step(worker, ends)
        ends.value.arrive()
        ends.value.advance()
        worker.start_dk(ends.query.wait())
        mma.wait(0)
        ends = release_query(ends)
    return ends


@cute.jit
def step(worker, ends):
    """Make dP and dS of a step, beside dK of the one before it."""
    if cutlass.const_expr(ends.dout.ring.channel.stages > 1):
        dprobabilities = worker.start_dprobabilities(ends.dout.wait())
        worker.start_dk(ends.query.wait())
        mma.wait(1)
        ends = differentiate(worker, ends, dprobabilities)
        mma.wait(0)
        ends = release_query(ends)
    else:
        # The only slot of dO is still to be filled.
        worker.start_dk(ends.query.wait())
        dprobabilities = worker.start_dprobabilities(ends.dout.wait())
        mma.wait(1)
        ends = release_query(ends)
        mma.wait(0)
        ends = differentiate(worker, ends, dprobabilities)
    return hand_over(worker, ends, dprobabilities)


def release_query(ends):
    """Give back the slot of Q of the step whose dK is complete."""
    ends.query.arrive()
    ends.query.advance()
    return ends


@cute.jit
def differentiate(worker, ends, dprobabilities):
    """Make dS of a step from its dP, which is complete, and P; in place."""
    ends.dout.arrive()
    ends.dout.advance()
    words = worker.exchange.read(ends.probabilities.wait())
    ends.probabilities.advance()
    delta = Statistics(worker.elements, 1, ends.row_stats.wait())
    worker.elements.differentiate(dprobabilities, words, delta)
    ends.row_stats.advance()
    return ends


@cute.jit
def hand_over(worker, ends, dscores):
    """Round dS for dK, and store it for dQ."""
    to_operand(dscores, worker.dscores)
    worker.share(ends.dscores.acquire())
    if cutlass.const_expr(worker.sender.ctas > 1):
        worker.sender.send(ends.dscores)
        ends.dscores.signal_own()
    else:
        ends.dscores.signal()
    ends.dscores.advance()
    return ends
