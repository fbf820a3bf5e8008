"""Backward attention on Blackwell: what a CTA owns, and which warps do what."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import tma
from attn4.kernels.dsl.carried import Bundle
from attn4.kernels.dsl.channel import Consumer, initialise
from attn4.kernels.dsl.pair import LEADER, Pair
from attn4.kernels.dsl.registers import reallocate
from attn4.kernels.dsl.smem import Arena
from attn4.kernels.dsl.tensor_memory import LANES, TensorArena
from attn4.kernels.shared.gradient_call import Copy, GradientScalars, Workspace
from attn4.kernels.shared.gradient_load import load
from attn4.kernels.shared.gradient_pass import GradientPass
from attn4.kernels.shared.key_tiles import find_key_tile
from attn4.kernels.shared.query_blocks import sums_of_sequence
from attn4.kernels.shared.scheduler import Lengths
from attn4.kernels.shared.sums import GROUP
from attn4.kernels.sm100.backward.gradient import KeyGradient, differentiate
from attn4.kernels.sm100.backward.mma import Products, multiply
from attn4.kernels.sm100.backward.pair_load import load_in_pair
from attn4.kernels.sm100.backward.pair_mma import multiply_in_pair
from attn4.kernels.sm100.backward.reduce import Slices, reduce
from attn4.kernels.sm100.backward.relay import Exchange, relay
from attn4.kernels.sm100.backward.store import store


@dataclass(frozen=True)
class Copies:
    """The bulk copies; of a pair three operands come twice, split by rows and by columns."""

    query: Copy
    key: Copy
    value: Copy
    dout: Copy
    dk_out: Copy
    dv_out: Copy
    query_columns: Copy | None = None
    key_columns: Copy | None = None
    dout_columns: Copy | None = None


class Backward(GradientPass):
    """The kernels of one plan."""

    def prepared(self, operands, gradients, workspace, lengths, scalars, counter):  # noqa: ARG002
        """The kernel, to be launched, one CTA a tile; dK and dV leave by bulk copies."""
        results = (gradients.dk, gradients.dv)
        if self.plan.cu_seqlens_k:
            results = tuple(tma.bounded_rows(rows) for rows in results)
        dk_out, dv_out = (
            Copy(*self.atom(name, rows, tma.STORE))
            for name, rows in zip(("dk_out", "dv_out"), results, strict=True)
        )
        copies = Copies(**operands, dk_out=dk_out, dv_out=dv_out)
        return self.kernel(copies, workspace, lengths, scalars)

    @cute.kernel
    def kernel(self, copies: Copies, workspace: Workspace, lengths: Lengths, scalars: GradientScalars):
        """Allocate, then give each warp its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        arena = Arena(plan)
        pair = Pair(plan.cta_group)
        rings = arena.rings(pair)
        tensor = TensorArena(plan, arena.pointer("tensor_address", Int32))
        multiplying = plan.role("mma").first_warp
        if warp == multiplying:
            initialise(rings)
            tensor.allocate()
        pair.synchronise()
        tensor.open()

        bounds = self.bounds(scalars)
        number, rank = self.place(pair)
        tile = find_key_tile(plan, bounds, lengths, number).of_cta(plan.cta_group, pair.rank).uniform()
        group = lengths.group
        if tile.key_block >= 0:
            role = plan.role("reduce")
            if warp < role.warps:
                reallocate(plan, role)
                slices = Slices(plan, tensor.lanes("dq"), self.slices(arena), self.thread(role), rank)
                sums = sums_of_sequence(plan, lengths, workspace.dq_sum, tile.batch)
                ends = self.ends(rings, "reduce")
                self.prepare(tile, arena, tensor, self.thread(role), ends)
                reduce(tile, bounds, group, sums, slices, ends)
            role = plan.role("compute")
            if warp >= role.first_warp and warp < role.first_warp + role.warps:
                reallocate(plan, role)
                memory = self.shared(arena, self.thread(role), pair.rank)
                gradient = KeyGradient(plan, bounds, scalars, memory, tensor, self.thread(role))
                differentiate(tile, group, gradient, self.ends(rings, "compute"))
            if warp >= multiplying:
                reallocate(plan, plan.role("mma"))
            steps = (tile.last - tile.first) * group
            if pair.leads(warp == multiplying):
                self.multiply(steps, self.products(arena, tensor), self.mma_ends(rings))
            if warp == plan.role("load").first_warp:
                tiles = self.row_tiles(arena, copies, rank)
                ends = self.ends(rings, "load")
                self.load(tile, lengths, tiles, self.row_stats(arena, workspace), ends)
                store(tile, tiles, ends)
            if cutlass.const_expr(plan.cta_group > 1):
                if warp == plan.role("relay").first_warp:
                    relay(steps, self.exchange(arena, pair, rings), self.ends(rings, "relay"))
        pair.synchronise()
        if warp == multiplying:
            tensor.free()

    def place(self, pair):
        """The number of this CTA's tile of keys, and its own among the CTAs that take that tile: a pair, or
        those of shares of the columns.
        """
        plan = self.plan
        cta = cute.arch.block_idx()[0]
        if plan.column_shares > 1:
            number = cta // plan.column_shares
            return number, cta - number * plan.column_shares
        return cta if plan.cta_group == 1 else cta // plan.cta_group, pair.rank

    def prepare(self, tile, arena, tensor, thread, ends):
        """What the reducing role does before the first dQ is there."""

    def products(self, arena, tensor):
        """The products, with their operands."""
        names = (*self.operand_slots, "dscores_shared")
        return Products(self.plan, self.dtype, {name: self.tile(arena, name) for name in names}, tensor)

    def multiply(self, steps, products, ends):
        """The multiplying role."""
        multiply_all = multiply if self.plan.cta_group == 1 else multiply_in_pair
        multiply_all(steps, products, ends)

    def load(self, tile, lengths, tiles, stats, ends):
        """The loading role."""
        load_all = load if self.plan.cta_group == 1 else load_in_pair
        load_all(self.plan, tile, lengths, tiles, stats, ends)

    def mma_ends(self, rings):
        """Those of the multiplying warp, which takes each block of queries twice: for S, and later for dK. Of
        a pair they have slots of their own for dK.
        """
        ends = self.ends(rings, "mma")
        if self.plan.cta_group > 1:
            return ends
        return Bundle(
            used_query=Consumer(rings["query"]), **{name: getattr(ends, name) for name in ends.carried}
        )

    def shared(self, arena, thread=0, rank=LEADER):
        """What a computing thread reads and writes in shared memory."""
        out = {"dk": self.tile(arena, "dk_out"), "dv": self.tile(arena, "dv_out")}
        return self.statistics(arena), self.dscores_tile(arena, thread // LANES, rank), out

    @cute.jit
    def dscores_tile(self, arena, half, rank):
        """Where dS goes, (keys, queries): of a pair a half of the queries, this CTA's or the peer's."""
        if cutlass.const_expr(self.plan.cta_group == 1):
            return self.tile(arena, "dscores_shared")[None, None, 0]
        whole, other = (self.plan.buffer(name) for name in ("dscores_shared", "dscores_peer"))
        at = rank * other.size if half == rank else other.offset - whole.offset
        return arena.tile("dscores_shared", self.layout("dscores_peer"), self.dtype, at=at)[None, None, 0]

    def exchange(self, arena, pair, rings):
        """What the relaying role sends, and where it goes: where this CTA's own half lies here."""
        whole, other = (self.plan.buffer(name) for name in ("dscores_shared", "dscores_peer"))
        source, place = (arena.at(at, Int32) for at in (other.offset, whole.offset + pair.rank * other.size))
        return Exchange(pair, rings["dscores_peer"], source, place)

    def row_tiles(self, arena, copies, rank):
        """The copies of operands into their slots, and of dK and dV out of theirs."""
        results = {
            name: self.copy_tiles(arena, copies, name, self.plan.cu_seqlens_k)
            for name in ("dk_out", "dv_out")
        }
        return {**self.operand_tiles(arena, copies, rank), **results}

    def slices(self, arena):
        """Slots of slices of dQ: (columns of a group, groups, rows, slots), as the sums are laid out."""
        buffer = self.plan.buffer("dq_slice")
        rows, columns = buffer.shape
        shape = (GROUP, columns // GROUP, rows, buffer.stages)
        layout = cute.make_layout(shape, stride=(1, rows * GROUP, GROUP, rows * columns))
        return cute.make_tensor(arena.pointer("dq_slice", Float32), layout)
