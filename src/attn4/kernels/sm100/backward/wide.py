"""Backward attention on Blackwell for head dimensions over 128 (see plan/sm100_backward_wide.py)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import tma
from attn4.kernels.dsl.channel import initialise
from attn4.kernels.dsl.registers import reallocate
from attn4.kernels.dsl.smem import Arena, row_major_layout
from attn4.kernels.dsl.tensor_memory import LANES, TensorArena
from attn4.kernels.shared.gradient_call import GradientScalars, Workspace
from attn4.kernels.shared.key_tiles import find_key_tile
from attn4.kernels.shared.query_blocks import first_block
from attn4.kernels.shared.scheduler import Lengths
from attn4.kernels.sm100.backward.gradient import KeyGradient, differentiate
from attn4.kernels.sm100.backward.kernel import Backward, Copies
from attn4.kernels.sm100.backward.reduce import Slices
from attn4.kernels.sm100.backward.store import store
from attn4.kernels.sm100.backward.wide_load import load
from attn4.kernels.sm100.backward.wide_mma import Products, multiply
from attn4.kernels.sm100.backward.wide_reduce import first_dim, reduce


class WideBackward(Backward):
    """The kernels of one plan, whose CTAs may own a share of the columns."""

    @cute.kernel
    def kernel(self, copies: Copies, workspace: Workspace, lengths: Lengths, scalars: GradientScalars):
        """Allocate, then give each warp its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        arena = Arena(plan)
        rings = arena.rings()
        tensor = TensorArena(plan, arena.pointer("tensor_address", Int32))
        multiplying = plan.role("mma").first_warp
        if warp == multiplying:
            initialise(rings)
            tensor.allocate()
        cute.arch.sync_threads()
        tensor.open()

        bounds = self.bounds(scalars)
        number = cute.arch.block_idx()[0] // plan.column_shares
        share = cute.arch.block_idx()[0] - number * plan.column_shares
        tile = find_key_tile(plan, bounds, lengths, number).uniform()
        group = lengths.group
        if tile.key_block >= 0:
            first = first_block(plan, lengths, tile.batch)
            role = plan.role("reduce")
            if warp < role.warps:
                reallocate(plan, role)
                slices = Slices(plan, tensor.lanes("dq"), self.slices(arena), self.thread(role))
                sums = cute.domain_offset((0, first, 0), workspace.dq_sum)
                reduce(tile, bounds, group, sums, slices, share, self.ends(rings, "reduce"))
            role = plan.role("compute")
            if warp >= role.first_warp and warp < role.first_warp + role.warps:
                reallocate(plan, role)
                gradient = KeyGradient(plan, bounds, scalars, self.shared(arena), tensor, self.thread(role))
                differentiate(tile, group, gradient, self.ends(rings, "compute"))
            if warp >= multiplying:
                reallocate(plan, plan.role("mma"))
            if warp == multiplying:
                products = Products(plan, self.dtype, self.operands(arena), tensor)
                multiply((tile.last - tile.first) * group, products, self.mma_ends(rings))
            if warp == plan.role("load").first_warp:
                tiles = self.parts(arena, copies, share)
                ends = self.ends(rings, "load")
                load(plan, tile, lengths, tiles, self.row_stats(arena, workspace), ends)
                store(tile, tiles, ends)
        cute.arch.sync_threads()
        if warp == multiplying:
            tensor.free()

    def operands(self, arena):
        """Tiles in shared memory by name, "dq_keys" those columns of K that each part of dQ takes."""
        plan = self.plan
        tiles = {name: self.tile(arena, name) for name in ("key", "value", "query", "dout", "dscores_shared")}
        parts = range(plan.dq_parts // plan.column_shares)
        return {**tiles, "dq_keys": [self.dq_keys(arena, first_dim(plan, part)) for part in parts]}

    def dq_keys(self, arena, first: int):
        """The columns of K from ``first`` on that fill the lanes, of the parts of K side by side."""
        rows, columns = self.plan.buffer("key").shape
        layout = row_major_layout((rows, LANES), 1, self.dtype, part=columns)
        return arena.tile("key", layout, self.dtype, at=first * rows * self.dtype.width // 8)

    def parts(self, arena, copies, share):
        """By name the copies of the parts of an operand in the order of its slots, and those of this CTA's
        columns of dK and dV.
        """
        own_first = (share, 1 - share)[: self.plan.column_shares]
        own_last = own_first[::-1]
        keys, queries = (self.bounded_keys, own_first), (self.bounded_queries, own_last)
        operands = {"key": keys, "value": keys, "query": queries, "dout": queries}
        return {
            **{
                name: tuple(self.columns(arena, copies, name, bounded, number) for number in order)
                for name, (bounded, order) in operands.items()
            },
            **{
                name: self.columns(arena, copies, name, self.plan.cu_seqlens_k, share)
                for name in ("dk_out", "dv_out")
            },
        }

    def columns(self, arena, copies, name: str, bounded: bool, number):
        """The copies between share ``number`` of the columns of a tensor and the slots of ``name``."""
        copy = getattr(copies, name)
        shared = self.tile(arena, name)
        return tma.RowTiles(copy.atom, copy.rows, shared, bounded=bounded, share=(1, 0, number))
