"""Backward attention on Blackwell for head dimensions over 128 (see plan/sm100_backward_wide.py)."""

from __future__ import annotations

from attn4.kernels.dsl import tma
from attn4.kernels.dsl.smem import row_major_layout
from attn4.kernels.dsl.tensor_memory import LANES
from attn4.kernels.sm100.backward.kernel import Backward
from attn4.kernels.sm100.backward.reduce import first_dim
from attn4.kernels.sm100.backward.wide_keep import keep
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
        """The columns of K from ``first`` on, as many as there are lanes. Where this CTA has fewer, V
        follows, and nobody reads what those lanes make of it.
        """
        rows, columns = self.plan.buffer("key").shape
        layout = row_major_layout((rows, LANES), 1, self.dtype, part=columns)
        return arena.tile("key", layout, self.dtype, at=first * rows * self.dtype.width // 8)

    def prepare(self, tile, arena, tensor, thread, ends):
        """Keep the other CTA's columns of K in tensor memory."""
        if self.plan.column_shares > 1:
            keys = self.tile(arena, "key_other")[None, None, 0]
            keep(tile, keys, tensor.lanes("kept_keys"), thread, ends)

    def row_tiles(self, arena, copies, rank):
        """By name the copies of the parts of an operand in the order of its slots, and those of this CTA's
        columns of dK and dV.
        """
        own_first = (rank, 1 - rank)[: self.plan.column_shares]
        results = dict.fromkeys(("dk_out", "dv_out"), (self.plan.cu_seqlens_k, rank))
        operands = {
            "key": (self.bounded_keys, (rank,)),
            "value": (self.bounded_keys, own_first),
            "query": (self.bounded_queries, own_first[::-1]),
            "dout": (self.bounded_queries, own_first[::-1]),
        }
        tiles = {
            name: self.copy_tiles(arena, copies, name, bounded, (1, 0, number))
            for name, (bounded, number) in results.items()
        }
        for name, (bounded, numbers) in operands.items():
            tiles[name] = tuple(self.copy_tiles(arena, copies, name, bounded, (1, 0, n)) for n in numbers)
        if self.plan.column_shares > 1:
            other, shared = copies.key, self.tile(arena, "key_other")
            share = (1, 0, 1 - rank)
            tiles["key_other"] = (
                tma.RowTiles(other.atom, other.rows, shared, bounded=self.bounded_keys, share=share),
            )
        return tiles
