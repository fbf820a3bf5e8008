"""Backward attention on Hopper, head dimensions over 128: what a CTA owns, and which warps do what."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math
from attn4.kernels.dsl.channel import initialise
from attn4.kernels.dsl.registers import reallocate
from attn4.kernels.dsl.smem import Arena
from attn4.kernels.shared.gradient_call import GradientScalars, Workspace
from attn4.kernels.shared.gradient_load import load
from attn4.kernels.shared.key_tiles import find_key_tile
from attn4.kernels.shared.query_blocks import first_block
from attn4.kernels.shared.scheduler import Lengths
from attn4.kernels.sm90.backward import gradient, probability, reduce
from attn4.kernels.sm90.backward.elements import Elements, Exchange
from attn4.kernels.sm90.backward.kernel import Backward, Copies, Gradients

WORD_BYTES = 4


class WideBackward(Backward):
    """The kernels of one plan."""

    @cute.kernel
    def kernel(
        self,
        copies: Copies,
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
        if warp == 0:
            initialise(rings)
        cute.arch.sync_threads()

        bounds = self.bounds(scalars)
        tile = find_key_tile(plan, bounds, lengths, cute.arch.block_idx()[0])
        names = ("probability", "gradient", "reduce")
        probabilities, differentials, sums = (plan.role(name) for name in names)
        if tile.key_block >= 0:
            first = first_block(plan, lengths, tile.batch)
            place = (tile, bounds, 0)
            if warp < probabilities.first_warp:
                reallocate(plan, plan.role("load"))
                if warp == 0:
                    stats = self.row_stats(arena, workspace, first)
                    ends = self.ends(rings, "load")
                    load(plan, tile, lengths.group, self.operand_tiles(arena, copies), stats, ends)
            elif warp < differentials.first_warp:
                reallocate(plan, probabilities)
                worker = self.probability(arena, place, scalars)
                probability.run(worker, lengths.group, self.ends(rings, "probability"))
                self.store(gradients.dv, tile, worker.dv, Float32(1.0), probabilities)
            elif warp < sums.first_warp:
                reallocate(plan, differentials)
                worker = self.gradient(arena, place)
                gradient.run(worker, lengths.group, self.ends(rings, "gradient"))
                self.store(gradients.dk, tile, worker.dk, scalars.softmax_scale, differentials)
            else:
                reallocate(plan, sums)
                rows = cute.domain_offset((0, first, 0), workspace.dq_sum)
                target = reduce.ColumnSums(
                    plan, bounds, rows, tile.kv_head * lengths.group, self.thread(sums)
                )
                worker = reduce.Reduce(plan, self.dtype, self.tiles(arena, "key", "dscores"))
                reduce.run(worker, tile, lengths.group, target, self.ends(rings, "reduce"))

    def tiles(self, arena, *names):
        """Tiles in shared memory, by name."""
        return {name: self.tile(arena, name) for name in names}

    def probability(self, arena, place, scalars):
        """What the warpgroup that makes P works with."""
        elements, exchange = self.elements(arena, place, "probability")
        tiles = self.tiles(arena, "key", "query", "dout")
        return probability.Probability(elements, tiles, exchange, scalars.softmax_scale * math.LOG2_E)

    def gradient(self, arena, place):
        """What the warpgroup that makes dS works with."""
        elements, exchange = self.elements(arena, place, "gradient")
        return gradient.Gradient(elements, self.tiles(arena, "value", "query", "dout", "dscores"), exchange)

    def elements(self, arena, place, role: str):
        """What a role works elementwise with, and where P goes from one to the other."""
        buffer = self.plan.buffer("probabilities")
        thread = self.thread(self.plan.role(role))
        words = buffer.size // buffer.stages // WORD_BYTES // 128
        exchange = Exchange(arena.pointer("probabilities", Int32), words, buffer.stages, thread)
        return Elements(self.plan, self.dtype, place, thread, self.statistics(arena)), exchange
