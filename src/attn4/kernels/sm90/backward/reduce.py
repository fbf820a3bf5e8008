"""The reducing role: dQ of every step, some columns at a time, added to its sums in global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import mma
from attn4.kernels.dsl.atomics import add_four
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.smem import transposed
from attn4.kernels.shared.key_tiles import first_query_block
from attn4.kernels.sm90.backward.differentiate import FOUR, QuerySums, Walk
from attn4.plan.sm90_backward_wide import DQ_COLUMNS


class ColumnSums(QuerySums):
    """Sums of dQ that one warpgroup adds to, some columns at a time."""

    @cute.jit
    def add_columns(self, values, walk, column: Int32):
        """Add a thread's registers of the columns from ``column`` on; the order is that of `sum_layout`."""
        sums = self.of(walk) + column * self.plan.tile_m
        for four in cutlass.range_constexpr(cute.size(values) // FOUR):
            registers = [values[FOUR * four + i] for i in range(FOUR)]
            add_four(sums + FOUR * (mma.GROUP_THREADS * four + self.thread), registers)


class Reduce(Fixed):
    """What the warpgroup keeps through the kernel."""

    def __init__(self, plan, dtype, tiles):
        self.plan = plan
        self.columns = DQ_COLUMNS[plan.head_dim]
        self.dq_mma = mma.tiled_product(
            dtype, 1, self.columns, mma.MN_MAJOR, mma.SHARED, a_major=mma.MN_MAJOR
        )
        dq = self.dq_mma.get_slice(0)
        self.key = tiles["key"]
        self.dscores_t = dq.make_fragment_A(dq.partition_A(transposed(tiles["dscores"])))

    @property
    def parts(self) -> int:
        """Products of a step, each of some columns."""
        return self.plan.head_dim // self.columns

    def start(self, slot, part):
        """Issue dQ = dS K of a part of the columns; returns its registers."""
        product = self.dq_mma.get_slice(0)
        rows, _, slots = (cute.size(mode) for mode in self.key.shape)
        columns = cute.local_tile(transposed(self.key), (self.columns, rows, slots), (part, 0, 0))
        key_t = product.make_fragment_B(product.partition_B(columns))[None, None, None, 0]
        dq = mma.accumulator(self.dq_mma, (self.plan.tile_m, self.columns))
        mma.start(self.dq_mma, dq, self.dscores_t[None, None, None, slot], key_t, zero=True)
        return dq


@cute.jit
def run(worker, tile, group: Int32, sums, ends):
    """All steps of the CTA's keys."""
    if tile.first < tile.last:
        begin = first_query_block(worker.plan, tile)
        walk = Walk(tile, begin, Int32(0), Int32(0), begin)
        ends.key.wait()
        for _ in cutlass.range((tile.last - tile.first) * group, unroll=1):
            sums, ends = step(worker, walk, sums, ends)
            walk = walk.following()
        sums.give_turn()


@cute.jit
def step(worker, walk, sums, ends):
    """Compute and add dQ of a step."""
    slot = ends.dscores.wait()
    sums.give_turn()
    sums.take_turn(walk)
    # A loop, not unrolled: ptxas would put off additions to the sums until after the next product.
    for part in cutlass.range(worker.parts, unroll=1):
        dq = worker.start(slot, part)
        mma.wait(0)
        sums.add_columns(dq, walk, part * worker.columns)
    ends.dscores.arrive()
    ends.dscores.advance()
    return sums, ends
