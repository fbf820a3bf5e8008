"""The reducing role where dQ is transposed: its parts from tensor memory, added to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import tensor_memory


def first_dim(plan, part: int) -> int:
    """The head dimension, of this CTA's columns, in lane 0 while ``part`` of dQ is computed: that where the
    part begins, or an earlier one if too few follow it to fill the lanes.
    """
    return min(plan.head_dim // plan.dq_parts * part, plan.head_dim - tensor_memory.LANES)


@cute.jit
def reduce(tile, bounds: cutlass.Constexpr, group: Int32, sums, slices, share: Int32, ends):
    """Add dQ of every step to ``sums`` (heads, blocks of the sequence, elements of a block).

    Lanes are head dimensions, and a slice is one of queries. CTA ``share`` of the same keys has its own parts
    of a block, and its own lock.
    """
    plan = slices.plan
    parts = plan.dq_parts // plan.column_shares
    elements = plan.tile_m * slices.rows
    for member in cutlass.range(group, unroll=1):
        head = tile.kv_head * group + member
        for block in cutlass.range(tile.first, tile.last, unroll=1):
            start = sums[head, block, None].iterator
            counter = cute.recast_ptr(start + plan.tile_m * plan.head_dim, dtype=Int32) + share
            turn = bounds.turn(tile, block)
            for part in cutlass.range_constexpr(parts):
                target = start + (share * parts + part) * elements
                lane = slices.rows * part - first_dim(plan, part)
                ends.dq.wait()
                tensor_memory.after_wait()
                for first in cutlass.range_constexpr(0, plan.tile_m, slices.width):
                    values = slices.read(first)
                    if cutlass.const_expr(first + slices.width == plan.tile_m):
                        tensor_memory.before_arrive()
                        ends.dq.arrive_together()
                        ends.dq.advance()
                    slices.stage(values, lane)
                    if cutlass.const_expr(part + first == 0):
                        slices.take_turn(counter, turn)
                    slices.add(target + first * slices.rows)
                    slices.advance()
            slices.give_turn(counter)
    if slices.leads:
        cute.arch.cp_async_bulk_wait_group(0, read=False)
