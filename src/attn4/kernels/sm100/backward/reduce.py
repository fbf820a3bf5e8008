"""The reducing role: dQ of each step from tensor memory, added to the sums in global memory.

A thread has a query, or of a pair of CTAs, each of which has half of the queries, half of its columns. Where
dQ is transposed, it has a head dimension of each part, and columns are queries.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import bulk, lock, tensor_memory
from attn4.kernels.dsl.carried import Carried
from attn4.kernels.dsl.pair import LEADER
from attn4.kernels.shared.query_blocks import sums_of_block
from attn4.kernels.shared.sums import GROUP

BARRIER = 1
"""The named barrier of this warpgroup."""


def first_dim(plan, part: int) -> int:
    """The head dimension, of this CTA's columns, in lane 0 while ``part`` of a transposed dQ is computed:
    where the part begins, or an earlier one if too few follow it to fill the lanes.
    """
    return min(plan.head_dim // plan.dq_parts * part, plan.head_dim - tensor_memory.LANES)


class Slices(Carried):
    """Slices of columns on their way: from tensor memory through slots of shared memory."""

    carried = ("slot",)

    def __init__(self, plan, columns, slots, thread, rank=LEADER):
        self.plan = plan
        self.rank = rank
        self.columns = columns
        self.slots = slots
        self.thread = thread
        self.slot = Int32(0)
        # All of a warp or none of it: a branch of one lane costs a loop around each of its bulk copies.
        self.leads = cute.arch.make_warp_uniform(thread // cute.arch.WARP_SIZE) == 0
        self.rows, self.width = plan.buffer("dq_slice").shape
        self.threads = plan.channel("dq_slice").full_arrivals
        self.parts = plan.dq_parts // plan.column_shares
        self.count = plan.buffer("dq").size
        # The next dP or, of a pair, the next S waits for the last columns: as many are taken at once as fit
        # in registers, of a pair all.
        together = 2 * self.width if self.count % (2 * self.width) == 0 else self.width
        self.held = together if plan.cta_group == 1 else self.count

    @property
    def bytes(self) -> int:
        """Of one slice."""
        return self.rows * self.width * Float32.width // 8

    def place(self, block):
        """Of the sums of a ``block``: where this CTA's begin, and the counter of who has added to them."""
        plan = self.plan
        elements = plan.tile_m * plan.head_dim
        counter = cute.recast_ptr(block + elements, dtype=Int32) + self.rank
        return block + self.rank * (elements // (plan.cta_group * plan.column_shares)), counter

    def lane(self, part: int) -> int:
        """Where ``part`` of this CTA's dQ begins."""
        return self.rows * part - first_dim(self.plan, part) if self.plan.transposed_dq else 0

    @cute.jit
    def read(self, first: cutlass.Constexpr[int]):
        """``held`` columns from ``first`` on of this thread's lane."""
        values = cute.make_rmem_tensor(self.held, Float32)
        # One instruction reads a power of two of columns.
        piece = self.held & -self.held
        for at in cutlass.range_constexpr(0, self.held, piece):
            part = cute.make_tensor(values.iterator + at, cute.make_layout(piece))
            tensor_memory.load(self.columns, first + at, part, self.thread)
        tensor_memory.wait_loads()
        return values

    @cute.jit
    def stage(self, values, lane: cutlass.Constexpr[int] = 0):
        """Copy this slice of the rows, which begin at ``lane``, to the next slot."""
        if self.leads:
            # All slots but the next may still be read.
            cute.arch.cp_async_bulk_wait_group(self.plan.buffer("dq_slice").stages - 1, read=True)
        self.meet()
        row = self.thread - lane
        if cutlass.const_expr(self.rows == self.threads) or (row >= 0 and row < self.rows):
            self.write(values, row)
        cute.arch.fence_view_async_shared()
        self.meet()

    @cute.jit
    def write(self, values, row):
        """Copy this thread's slice to ``row`` of the next slot."""
        for group in cutlass.range_constexpr(self.width // GROUP):
            part = cute.make_tensor(values.iterator + group * GROUP, cute.make_layout(GROUP))
            cute.autovec_copy(part, self.slots[None, group, row, self.slot])

    @cute.jit
    def add(self, target):
        """Add the slot that is staged to the sums at ``target``."""
        if self.leads:
            with cute.arch.elect_one():
                bulk.add(target, self.slots[None, None, None, self.slot].iterator, self.bytes)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def take_turn(self, counter, turn: Int32):
        """Wait for the tiles of keys that are added before this one."""
        if cutlass.const_expr(self.plan.deterministic):
            if self.leads:
                with cute.arch.elect_one():
                    lock.wait_to_copy(counter, turn)

    @cute.jit
    def give_turn(self, counter):
        """Let the next tile of keys be added, once this one is."""
        if cutlass.const_expr(self.plan.deterministic):
            if self.leads:
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                with cute.arch.elect_one():
                    lock.give(counter)

    def meet(self):
        """All threads of the role."""
        cute.arch.sync_warp()
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=self.threads)

    def advance(self):
        """Take the next slot."""
        following = self.slot + 1
        self.slot = following - Int32(following == self.plan.buffer("dq_slice").stages) * following


@cute.jit
def reduce(tile, bounds: cutlass.Constexpr, group: Int32, sums, slices, ends):
    """Add dQ of every step to ``sums`` (heads, blocks of the sequence, elements of a block)."""
    for member in cutlass.range(group, unroll=1):
        head = tile.kv_head * group + member
        for block in cutlass.range(tile.first, tile.last, unroll=1):
            target, counter = slices.place(sums_of_block(sums, head, block).iterator)
            turn = bounds.turn(tile, block)
            for part in cutlass.range_constexpr(slices.parts):
                ends.dq.wait()
                tensor_memory.after_wait()
                for first in cutlass.range_constexpr(0, slices.count, slices.held):
                    values = slices.read(first)
                    if cutlass.const_expr(first + slices.held == slices.count):
                        tensor_memory.before_arrive()
                        ends.dq.arrive_together()
                        ends.dq.advance()
                    for at in cutlass.range_constexpr(0, slices.held, slices.width):
                        held = cute.make_tensor(values.iterator + at, cute.make_layout(slices.width))
                        slices.stage(held, slices.lane(part))
                        if cutlass.const_expr(part + first + at == 0):
                            slices.take_turn(counter, turn)
                        slices.add(target + (part * slices.count + first + at) * slices.rows)
                        slices.advance()
            slices.give_turn(counter)
    if slices.leads:
        cute.arch.cp_async_bulk_wait_group(0, read=False)
