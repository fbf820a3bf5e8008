"""Backward attention on Blackwell for head dimensions over 128 (see plan/sm100_backward_wide.py)."""

from __future__ import annotations

from attn4.kernels.dsl.smem import row_major_layout
from attn4.kernels.dsl.tensor_memory import LANES
from attn4.kernels.sm100.backward.kernel import Backward
from attn4.kernels.sm100.backward.reduce import first_dim
from attn4.kernels.sm100.backward.wide_load import load
from attn4.kernels.sm100.backward.wide_mma import Products, multiply


class WideBackward(Backward):
    """The kernels of one plan, whose CTAs may own a share of the columns."""

    def products(self, arena, tensor):
        """The products; their operands are "dq_keys", too, those columns of K that each part of dQ takes."""
        plan = self.plan
        tiles = {name: self.tile(arena, name) for name in (*self.operand_slots, "dscores_shared")}
        parts = range(plan.dq_parts // plan.column_shares)
        dq_keys = [self.dq_keys(arena, first_dim(plan, part)) for part in parts]
        return Products(plan, self.dtype, {**tiles, "dq_keys": dq_keys}, tensor)

    def multiply(self, steps, products, ends):
        """The multiplying role."""
        multiply(steps, products, ends)

    def load(self, tile, lengths, tiles, stats, ends):
        """The loading role."""
        load(self.plan, tile, lengths, tiles, stats, ends)

    def dq_keys(self, arena, first: int):
        """The columns of K from ``first`` on that fill the lanes, of the parts of K side by side."""
        rows, columns = self.plan.buffer("key").shape
        layout = row_major_layout((rows, LANES), 1, self.dtype, part=columns)
        return arena.tile("key", layout, self.dtype, at=first * rows * self.dtype.width // 8)

    def row_tiles(self, arena, copies, rank):
        """By name the copies of the parts of an operand in the order of its slots, and those of this CTA's
        columns of dK and dV.
        """
        own_first = (rank, 1 - rank)[: self.plan.column_shares]
        own_last = own_first[::-1]
        keys, queries = (self.bounded_keys, own_first), (self.bounded_queries, own_last)
        operands = {"key": keys, "value": keys, "query": queries, "dout": queries}
        return {
            **{
                name: tuple(self.copy_tiles(arena, copies, name, bounded, (1, 0, number)) for number in order)
                for name, (bounded, order) in operands.items()
            },
            **{
                name: self.copy_tiles(arena, copies, name, self.plan.cu_seqlens_k, (1, 0, rank))
                for name in ("dk_out", "dv_out")
            },
        }
