"""Backward attention on Hopper: what a CTA owns, and which warps do what."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import math, mma
from attn4.kernels.dsl.carried import Bundle
from attn4.kernels.dsl.channel import Consumer, Producer, Turn, initialise
from attn4.kernels.dsl.registers import reallocate
from attn4.kernels.dsl.smem import Arena
from attn4.kernels.shared.gradient_call import Copy, Gradients, GradientScalars, Workspace
from attn4.kernels.shared.gradient_load import follow_keys, follow_queries
from attn4.kernels.shared.gradient_pass import GradientPass
from attn4.kernels.shared.key_tiles import key_order
from attn4.kernels.shared.scheduler import Lengths, run_schedule, tile_source
from attn4.kernels.shared.stream import TileStream
from attn4.kernels.sm90.backward.differentiate import Operands, Worker, differentiate
from attn4.kernels.sm90.backward.outlet import Outlet
from attn4.kernels.sm90.backward.turns import keep_turns


@dataclass(frozen=True)
class Copies:
    """The four bulk copies."""

    query: Copy
    key: Copy
    value: Copy
    dout: Copy


class Backward(GradientPass):
    """The kernels of one plan."""

    def prepared(self, operands, gradients, workspace, lengths, scalars, counter):
        """The kernel, to be launched; dK and dV are written by threads."""
        return self.kernel(Copies(**operands), workspace, gradients, lengths, scalars, counter)

    @cute.kernel
    def kernel(
        self,
        copies: Copies,
        workspace: Workspace,
        gradients: Gradients,
        lengths: Lengths,
        scalars: GradientScalars,
        counter: cute.Tensor | None,
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
        order = key_order(plan, bounds, lengths)
        words = arena.words("tile")
        # Each role its own: what one advances, the next would begin with.
        following, streaming, turning, computed = (
            TileStream(plan, order, words, Consumer(rings["tile"])) for _ in range(4)
        )
        computing = plan.role("differentiate")
        if warp < computing.first_warp:
            reallocate(plan, plan.role("load"))
            tiles = self.operand_tiles(arena, copies)
            if warp == plan.role("load").first_warp:
                stats = self.row_stats(arena, workspace)
                follow_queries(streaming, lengths, tiles, stats, self.ends(rings, "load"))
            elif warp == plan.role("load_keys").first_warp:
                follow_keys(following, tiles, self.ends(rings, "load_keys"))
            elif warp == plan.role("schedule").first_warp:
                run_schedule(order, tile_source(plan, counter, rings, arena), Producer(rings["tile"]), words)
            if cutlass.const_expr(plan.deterministic):
                if warp == plan.role("turns").first_warp:
                    ends = self.ends(rings, "turns")
                    keep_turns(turning, lengths, workspace.dq_sum, bounds, ends)
        else:
            reallocate(plan, computing)
            worker = self.worker(arena, bounds, lengths, scalars)
            outlet = Outlet(worker, workspace.dq_sum, gradients, scalars.softmax_scale)
            differentiate(computed, worker, outlet, self.worker_ends(rings))

    def worker(self, arena, bounds, lengths, scalars):
        """What a computing warpgroup works with."""
        plan = self.plan
        role = plan.role("differentiate")
        thread = self.thread(role)
        tiles = {name: self.tile(arena, name) for name in ("key", "value", "query", "dout", "dscores")}
        ops = Operands(plan, self.dtype, role.warps // 4, thread, tiles)
        turn = Turn(plan.channel("turn"), cute.arch.make_warp_uniform(thread // mma.GROUP_THREADS))
        return Worker(ops, bounds, lengths, scalars.softmax_scale * math.LOG2_E, self.statistics(arena), turn)

    def worker_ends(self, rings):
        """What the computing warps take and hand over: Q once for S, ahead, and once for dK; dS both ways."""
        ends = self.ends(rings, "differentiate")
        return Bundle(
            ahead=Consumer(rings["query"]),
            shared=Producer(rings["dscores"]),
            **{name: getattr(ends, name) for name in ends.carried if name != "tile"},
        )
