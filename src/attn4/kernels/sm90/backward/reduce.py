"""The reducing role: dQ of every step, some columns at a time, added to its sums in global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import lock, mma
from attn4.kernels.dsl.atomics import add_four
from attn4.kernels.dsl.carried import Carried, Fixed
from attn4.kernels.dsl.smem import transposed
from attn4.kernels.shared.walk import Walk
from attn4.kernels.sm90.backward.outlet import FOUR, lock_of


class ColumnSums(Carried):
    """Sums of dQ that one warpgroup of each CTA of a cluster adds to, some columns at a time.

    Of deterministic ones each warp of the cluster has a counter: it adds to elements of its own, in turns of
    its own. ``owed`` is the address of the counter that it has still to move on, or 0.
    """

    carried = ("owed",)

    def __init__(self, plan, bounds, sums, warp):
        self.plan = plan
        self.bounds = bounds
        self.sums = sums
        self.warp = warp
        self.owed = cutlass.Int64(0)

    @cute.jit
    def take_turn(self, walk):
        """Wait until this warp may add to the sums of a step."""
        if cutlass.const_expr(self.plan.deterministic):
            counter = lock_of(self.plan, self.sums.block(walk)) + self.warp
            if cute.arch.lane_idx() == 0:
                lock.wait(counter, self.bounds.turn(walk.tile, walk.block))
            cute.arch.sync_warp()
            self.owed = cutlass.Int64(counter.toint())

    @cute.jit
    def give_turn(self):
        """Let the next CTA add where this warp has."""
        if cutlass.const_expr(self.plan.deterministic):
            cute.arch.sync_warp()
            if self.owed != 0 and cute.arch.lane_idx() == 0:
                lock.give(cute.make_ptr(Int32, self.owed, cute.AddressSpace.gmem))

    @cute.jit
    def add_columns(self, values, walk, column: Int32):
        """Add a thread's registers of the columns from ``column`` on; the order is that of `sum_layout`."""
        sums = self.sums.of(walk) + column * self.plan.tile_m
        for four in cutlass.range_constexpr(cute.size(values) // FOUR):
            registers = [values[FOUR * four + i] for i in range(FOUR)]
            place = sums + FOUR * (mma.GROUP_THREADS * four + self.sums.thread)
            add_four(place, registers, walk.number)


class Reduce(Fixed):
    """What the warpgroup keeps through the kernel; CTA ``rank`` of a cluster has its share of the columns.

    They are cut into parts, one a product. Of an odd number the one in the middle goes to either CTA in turn,
    by query block: what a warp adds to a block is the same for all tiles of keys.
    """

    def __init__(self, plan, dtype, tiles, rank):
        self.plan = plan
        self.columns = plan.dq_columns
        self.rank = rank
        self.dq_mma = mma.tiled_product(
            dtype, 1, self.columns, mma.MN_MAJOR, mma.SHARED, a_major=mma.MN_MAJOR
        )
        self.tiles = tiles

    def parts(self, block):
        """The parts [first, last) that this CTA computes of the sums of a query block."""
        count = self.plan.head_dim // self.columns
        if self.plan.cluster == 1:
            return Int32(0), Int32(count)
        split = count // 2 + count % 2 * (1 - block % 2)
        return self.rank * split, split + self.rank * (count - split)

    def start(self, slot, part):
        """Issue a part of dQ = dS K over all keys; returns its registers."""
        dq = mma.accumulator(self.dq_mma, (self.plan.tile_m, self.columns))
        self._start(dq, (slot, 0), ("key", part))
        if self.plan.cluster > 1:
            held = self.plan.buffer("peer_key").shape[1]
            first = self.rank * (self.plan.head_dim - held) // self.columns
            self._start(dq, (slot, 1), ("peer_key", part - first))
        return dq

    def _start(self, dq, dscores, key):
        """Issue the product over the keys of one CTA: ``dscores`` is (slot, CTA), ``key`` (name, part)."""
        product = self.dq_mma.get_slice(0)
        keys, queries = self.plan.tile_n, self.plan.tile_m
        (slot, owner), (name, part) = dscores, key
        a = cute.local_tile(transposed(self.tiles["dscores"])[None, None, slot], (queries, keys), (0, owner))
        b = cute.local_tile(transposed(self.tiles[name])[None, None, 0], (self.columns, keys), (part, 0))
        a, b = (
            product.make_fragment_A(product.partition_A(a)),
            product.make_fragment_B(product.partition_B(b)),
        )
        mma.start(self.dq_mma, dq, a, b, zero=owner == 0)


@cute.jit
def run(worker, tile, group: Int32, sums, ends):
    """All steps of a tile of keys."""
    if tile.first < tile.last:
        walk = Walk(worker.plan, tile, group)
        ends.key.wait()
        if cutlass.const_expr(worker.plan.cluster > 1):
            ends.peer_key.wait()
        for _ in cutlass.range(walk.steps, unroll=1):
            sums, ends = step(worker, walk, sums, ends)
            walk = walk.following()
        sums.give_turn()
        ends.key.arrive()
        ends.key.advance()
        if cutlass.const_expr(worker.plan.cluster > 1):
            ends.peer_key.advance()
    return ends


@cute.jit
def step(worker, walk, sums, ends):
    """Compute and add dQ of a step."""
    slot = ends.dscores.wait()
    # A loop, not unrolled: ptxas would put off additions to the sums until after the next product.
    first, last = worker.parts(walk.block)
    for part in cutlass.range(first, last, unroll=1):
        dq = worker.start(slot, part)
        sums = change_turns(sums, walk, part == first)
        mma.wait(0)
        sums.add_columns(dq, walk, part * worker.columns)
    ends.dscores.arrive()
    ends.dscores.advance()
    return sums, ends


@cute.jit
def change_turns(sums, walk, first: cutlass.Boolean):
    """Of deterministic sums: before the first part of a step give the last turn on, and wait for the next."""
    if cutlass.const_expr(sums.plan.deterministic):
        if first:
            sums.give_turn()
            sums.take_turn(walk)
    return sums
