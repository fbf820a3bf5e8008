"""Backward attention on Hopper, head dimensions over 128: what a CTA owns, and which warps do what."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, mma, tma
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.channel import initialise
from attn4.kernels.dsl.pair import Pair
from attn4.kernels.dsl.registers import reallocate
from attn4.kernels.dsl.smem import Arena, row_major_layout
from attn4.kernels.shared.gradient_call import Copy, Gradients, GradientScalars, Workspace
from attn4.kernels.shared.gradient_load import load_keys, load_queries
from attn4.kernels.shared.key_tiles import KeyBounds, count_key_tiles, find_key_tile
from attn4.kernels.shared.scheduler import Lengths
from attn4.kernels.sm90.backward import gradient, probability, reduce
from attn4.kernels.sm90.backward.elements import Elements, Exchange
from attn4.kernels.sm90.backward.kernel import Backward, Copies
from attn4.kernels.sm90.backward.outlet import query_sums, store_rows

WORD_BYTES = 4


@dataclass(frozen=True)
class WideCopies(Copies):
    """The bulk copies; the last is of some columns of the other CTA's keys."""

    peer_key: Copy | None = None


class Dealt(Fixed):
    """The tiles of keys of a cluster, of which ``plan`` has all the keys in a tile: dealt one by one."""

    def __init__(self, plan, bounds, lengths):
        self.plan = plan
        self.bounds = bounds
        self.lengths = lengths
        self.rank = cute.arch.block_idx_in_cluster() if plan.cluster > 1 else 0
        self.cluster = cute.arch.block_idx()[0] // plan.cluster
        self.clusters = cute.arch.grid_dim()[0] // plan.cluster
        self.turns = (count_key_tiles(plan, lengths) + self.clusters - 1) // self.clusters

    def tile(self, turn):
        """That of a turn; past the last one its ``key_block`` is negative. By one whole warp."""
        number = turn * self.clusters + self.cluster
        return find_key_tile(self.plan, self.bounds, self.lengths, number)


class WideBackward(Backward):
    """The kernels of one plan.

    ``joint`` is the plan as a cluster sees it, with the keys of all its CTAs in a tile.
    """

    def __init__(self, plan):
        super().__init__(plan)
        self.joint = dataclasses.replace(plan, tile_n=plan.tile_n * plan.cluster)

    def grid(self, lengths, ctas):
        """Grid and cluster: a cluster a tile of keys, of a persistent kernel no more than ``ctas`` CTAs."""
        size, clusters = self.plan.cluster, count_key_tiles(self.joint, lengths)
        if self.plan.schedule.persistent:
            clusters = cutlass.max(cutlass.min(ctas // size, clusters), 1)
        return {"grid": [clusters * size, 1, 1], "cluster": [size, 1, 1]}

    def prepared(self, operands, gradients, workspace, lengths, scalars, counter):  # noqa: ARG002
        """The kernel, to be launched; dK and dV are written by threads."""
        return self.kernel(WideCopies(**operands), workspace, gradients, lengths, scalars)

    def bounds(self, scalars: GradientScalars) -> KeyBounds:
        """Which queries see a key of the cluster."""
        plan = self.joint
        return KeyBounds(plan.mask, plan.tile_m, plan.tile_n, scalars.window_left, scalars.window_right)

    @cute.kernel
    def kernel(
        self,
        copies: WideCopies,
        workspace: Workspace,
        gradients: Gradients,
        lengths: Lengths,
        scalars: GradientScalars,
    ):
        """Allocate, then give each warp its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        arena = Arena(plan)
        rings = arena.rings()
        cluster = Pair(plan.cluster)
        if warp == 0:
            initialise(rings)
        cluster.synchronise()

        dealt = Dealt(self.joint, self.bounds(scalars), lengths)
        probabilities, differentials, adding = (
            plan.role(name) for name in ("probability", "gradient", "reduce")
        )
        if warp < probabilities.first_warp:
            reallocate(plan, plan.role("load"))
            tiles = self.operand_tiles(arena, copies)
            if warp == plan.role("load").first_warp:
                stats, ends = self.row_stats(arena, workspace), self.ends(rings, "load")
                for turn in cutlass.range(dealt.turns, unroll=1):
                    ends = load_queries(plan, dealt.tile(turn), lengths, tiles, stats, ends)
            elif warp == plan.role("load_keys").first_warp:
                ends = self.ends(rings, "load_keys")
                # V comes back first.
                names = ("value", "key", "peer_key")[: plan.cluster + 1]
                for turn in cutlass.range(dealt.turns, unroll=1):
                    ends = load_keys(dealt.tile(turn), tiles, ends, names)
        elif warp < differentials.first_warp:
            reallocate(plan, probabilities)
            worker, ends = self.probability(arena, dealt, scalars), self.ends(rings, "probability")
            for turn in cutlass.range(dealt.turns, unroll=1):
                tile = dealt.tile(turn)
                ends = probability.run(worker, tile, lengths.group, ends)
                self.store(probabilities, gradients.dv, tile, worker.dv, Float32(1.0))
        elif warp < adding.first_warp:
            reallocate(plan, differentials)
            worker, ends = self.gradient(arena, dealt, cluster), self.ends(rings, "gradient")
            for turn in cutlass.range(dealt.turns, unroll=1):
                tile = dealt.tile(turn)
                ends = gradient.run(worker, tile, lengths.group, ends)
                self.store(differentials, gradients.dk, tile, worker.dk, scalars.softmax_scale)
        else:
            reallocate(plan, adding)
            worker = reduce.Reduce(plan, self.dtype, self.reduce_tiles(arena), cluster.rank)
            ends = self.ends(rings, "reduce")
            thread = self.thread(adding)
            number = cute.arch.make_warp_uniform(thread // cute.arch.WARP_SIZE) + cluster.rank * adding.warps
            for turn in cutlass.range(dealt.turns, unroll=1):
                tile = dealt.tile(turn)
                sums = query_sums(plan, lengths, workspace.dq_sum, tile, thread)
                sums = reduce.ColumnSums(plan, dealt.bounds, sums, number)
                ends = reduce.run(worker, tile, lengths.group, sums, ends)
        if cutlass.const_expr(plan.cluster > 1):
            # Until then the others write here.
            cluster.synchronise()

    @cute.jit
    def store(self, role, target, tile, values, scale):
        """Write this CTA's rows of an accumulator of ``role``."""
        if tile.key_block >= 0:
            rank = cute.arch.block_idx_in_cluster() if self.plan.cluster > 1 else 0
            mine = dataclasses.replace(tile, key_block=tile.key_block * self.plan.cluster + rank)
            store_rows(self.plan, self.thread(role), target, mine, values, scale)

    def probability(self, arena, dealt, scalars):
        """What the warpgroup that makes P works with."""
        elements, exchange = self.elements(arena, dealt, "probability")
        tiles = self.tiles(arena, "key", "query", "dout")
        return probability.Probability(elements, tiles, exchange, scalars.softmax_scale * math.LOG2_E)

    def gradient(self, arena, dealt, cluster):
        """What the warpgroup that makes dS works with."""
        elements, exchange = self.elements(arena, dealt, "gradient")
        tiles = self.tiles(arena, "value", "query", "dout", "dscores")
        sender = gradient.Sender(self.plan, arena.pointer("dscores", Int32), cluster, elements.thread)
        return gradient.Gradient(elements, tiles, exchange, sender)

    def elements(self, arena, dealt, role: str):
        """What a role works elementwise with, and where P goes from one to the other."""
        buffer = self.plan.buffer("probabilities")
        thread = self.thread(self.plan.role(role))
        words = buffer.size // buffer.stages // WORD_BYTES // mma.GROUP_THREADS
        exchange = Exchange(arena.pointer("probabilities", Int32), words, buffer.stages, thread)
        keys = (dealt.bounds, dealt.rank * self.plan.tile_n)
        return Elements(self.plan, self.dtype, keys, thread, self.statistics(arena)), exchange

    def reduce_tiles(self, arena):
        """What dQ is computed from."""
        return self.tiles(arena, "key", "dscores", *(("peer_key",) if self.plan.cluster > 1 else ()))

    def tiles(self, arena, *names):
        """Tiles in shared memory, by name."""
        return {name: self.tile(arena, name) for name in names}

    def atom(self, name: str, rows, direction=None):
        """The copy of tiles of ``name``; of Q and dO each CTA of a cluster copies some rows to all."""
        plan = self.plan
        if plan.cluster == 1 or name not in ("query", "dout"):
            return super().atom(name, rows, direction)
        count, columns = plan.buffer(name).shape
        part = (count // plan.cluster, columns)
        return tma.copy_atom(rows, row_major_layout(part, 1, self.dtype), part, tma.LOAD_OF_CLUSTER)

    def operand_copies(self, query, key, value, dout) -> dict[str, Copy]:
        """The copies of Q, K, V and dO, (rows, dim, heads, batch), into shared memory."""
        copies = super().operand_copies(query, key, value, dout)
        if self.plan.cluster > 1:
            rows = tma.bounded_rows(key) if self.bounded_keys else key
            copies["peer_key"] = Copy(*self.atom("peer_key", rows))
        return copies

    def operand_tiles(self, arena, copies) -> dict[str, tma.RowTiles]:
        """The copies into slots."""
        tiles = super().operand_tiles(arena, copies)
        if self.plan.cluster > 1:
            tiles["peer_key"] = self.copy_tiles(arena, copies, "peer_key", self.bounded_keys)
        return tiles

    def copy_tiles(self, arena, copies, name: str, bounded: bool, share=(1, 0, 0)) -> tma.RowTiles:
        """The copies between a tensor and the slots of ``name``; in a cluster the shares are its own."""
        size = self.plan.cluster
        if size == 1:
            return super().copy_tiles(arena, copies, name, bounded, share)
        rank = cute.arch.block_idx_in_cluster()
        copy, shared, share, ctas = getattr(copies, name), self.tile(arena, name), (size, rank, 0), 1
        if name in ("query", "dout"):
            rows, columns, slots = (cute.size(mode) for mode in shared.shape)
            shared, ctas = cute.local_tile(shared, (rows // size, columns, slots), (rank, 0, 0)), size
        if name == "peer_key":
            parted = cute.size(shared, mode=[1]) < self.plan.head_dim
            share = (size, 1 - rank, rank if parted else 0)
        return tma.RowTiles(copy.atom, copy.rows, shared, bounded=bounded, share=share, ctas=ctas)
