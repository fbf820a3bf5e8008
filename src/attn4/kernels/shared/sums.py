"""Where the float32 sums of dQ lie: in the order in which the kernel's threads hold them."""

from __future__ import annotations

import cutlass.cute as cute

from attn4.kernels.dsl import mma

GROUP = 4
"""Columns that lie together where a thread holds a row of tensor memory: 16 bytes. They are head dimensions,
or, where dQ is transposed, queries.
"""


def sum_layout(plan):
    """Offset of element (row, column) within the sums of a block of queries.

    Each CTA of a pair has the sums of half the rows behind one another, and in its lower and upper lanes
    the two halves of their columns.
    """
    if plan.transposed_dq:
        rows = plan.head_dim // plan.dq_parts
        return cute.make_layout(
            ((GROUP, plan.tile_m // GROUP), (rows, plan.dq_parts)),
            stride=((1, GROUP * rows), (GROUP, plan.tile_m * rows)),
        )
    if groups := adding_groups(plan):
        return mma.side_by_side((plan.tile_m, plan.head_dim), groups)
    if plan.cta_group == 1:
        return cute.make_layout(
            (plan.tile_m, (GROUP, plan.head_dim // GROUP)), stride=(GROUP, (1, GROUP * plan.tile_m))
        )
    rows = plan.tile_m // 2
    return cute.make_layout(
        ((rows, 2), (GROUP, plan.head_dim // (2 * GROUP), 2)),
        stride=((GROUP, rows * plan.head_dim), (1, GROUP * plan.tile_m, GROUP * rows)),
    )


def adding_groups(plan) -> int:
    """Warpgroups that add to the sums as their accumulators lie; 0 where they come from tensor memory."""
    if any(buffer.space == "tensor" for buffer in plan.buffers):
        return 0
    return next(role for role in plan.roles if role.name in ("differentiate", "reduce")).warps // 4
