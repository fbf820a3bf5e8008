"""Backward attention on Hopper: what a CTA owns, and which warps do what."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, mma
from attn4.kernels.dsl.carried import Bundle
from attn4.kernels.dsl.channel import Consumer, Producer, Turn, initialise
from attn4.kernels.dsl.exchange import store_exchanged
from attn4.kernels.dsl.registers import reallocate
from attn4.kernels.dsl.smem import Arena
from attn4.kernels.shared.gradient_call import Copy, GradientScalars, Workspace
from attn4.kernels.shared.gradient_load import load
from attn4.kernels.shared.gradient_pass import GradientPass
from attn4.kernels.shared.key_tiles import find_key_tile
from attn4.kernels.shared.query_blocks import first_block
from attn4.kernels.shared.scheduler import Lengths
from attn4.kernels.sm90.backward.differentiate import Operands, QuerySums, Worker, run


@dataclass(frozen=True)
class Copies:
    """The four bulk copies."""

    query: Copy
    key: Copy
    value: Copy
    dout: Copy


@dataclass(frozen=True)
class Gradients:
    """Where dK and dV go, (rows, dim, heads, batch)."""

    dk: cute.Tensor
    dv: cute.Tensor


class Backward(GradientPass):
    """The kernels of one plan."""

    def prepared(self, operands, results, workspace, lengths, scalars):
        """The kernel, to be launched; dK and dV are written by threads."""
        return self.kernel(Copies(**operands), workspace, Gradients(*results), lengths, scalars)

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
        role = plan.role("differentiate")
        if tile.key_block >= 0:
            first = first_block(plan, lengths, tile.batch)
            if warp < role.first_warp:
                reallocate(plan, plan.role("load"))
                if warp == 0:
                    stats = self.row_stats(arena, workspace, first)
                    ends = self.ends(rings, "load")
                    load(plan, tile, lengths.group, self.operand_tiles(arena, copies), stats, ends)
            else:
                reallocate(plan, role)
                place = (tile, bounds, lengths.group)
                rows = cute.domain_offset((0, first, 0), workspace.dq_sum)
                sums = QuerySums(plan, bounds, rows, tile.kv_head * lengths.group, self.thread(role))
                worker = self.worker(arena, place, scalars, self.thread(role))
                run(worker, self.worker_ends(rings, sums))
                self.store(gradients.dv, tile, worker.dv, Float32(1.0), role)
                self.store(gradients.dk, tile, worker.dk, scalars.softmax_scale, role)

    def worker(self, arena, place, scalars, thread):
        """What a computing warpgroup works with."""
        plan = self.plan
        groups = plan.role("differentiate").warps // 4
        tiles = {name: self.tile(arena, name) for name in ("key", "value", "query", "dout", "dscores")}
        ops = Operands(plan, self.dtype, groups, thread, tiles)
        turn = Turn(plan.channel("turn"), cute.arch.make_warp_uniform(thread // mma.GROUP_THREADS))
        return Worker(ops, place, scalars.softmax_scale * math.LOG2_E, self.statistics(arena), turn)

    def worker_ends(self, rings, sums):
        """What the computing warps take and hand over: Q once for S, ahead, and once for dK; dS both ways."""
        ends = self.ends(rings, "differentiate")
        return Bundle(
            ahead=Consumer(rings["query"]),
            shared=Producer(rings["dscores"]),
            sums=sums,
            **{name: getattr(ends, name) for name in ends.carried},
        )

    @cute.jit
    def store(self, target, tile, values, scale, role):
        """Write the rows of an accumulator of ``role`` that are rows of the sequence, times ``scale``."""
        plan = self.plan
        batch = Int32(0) if cutlass.const_expr(plan.cu_seqlens_k) else tile.batch
        words = [
            math.pack(values[2 * i] * scale, values[2 * i + 1] * scale, self.dtype)
            for i in range(cute.size(values) // 2)
        ]
        first_row = mma.first_row(self.thread(role))
        for half in cutlass.range_constexpr(2):
            row = tile.key_block * plan.tile_n + first_row + 8 * half
            place = target[tile.k_begin + row, None, tile.kv_head, batch]
            store_exchanged(words[half::2], place, row < tile.k_rows)
