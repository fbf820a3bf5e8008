"""Forward attention on Hopper: what a CTA owns, and which warps do what."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, mma, tma
from attn4.kernels.dsl.channel import Consumer, Producer, Turn, initialise
from attn4.kernels.dsl.registers import reallocate
from attn4.kernels.dsl.smem import Arena, transposed
from attn4.kernels.dsl.staging import Staging
from attn4.kernels.shared.call import ForwardKernel, Outputs, Scalars
from attn4.kernels.shared.scheduler import Lengths, TileOrder, run_schedule, tile_source
from attn4.kernels.shared.softmax import OnlineSoftmax
from attn4.kernels.shared.stream import TileStream
from attn4.kernels.sm90.forward.attend import Worker, attend
from attn4.kernels.sm90.forward.load import load
from attn4.kernels.sm90.forward.operands import Operands
from attn4.kernels.sm90.forward.store import ExchangedStore, StagedStore

TILES = ("query", "key", "value")


@dataclass(frozen=True)
class Copies:
    """The three bulk copies, each an atom and the coordinates of its tensor."""

    query: cute.CopyAtom
    query_rows: cute.Tensor
    key: cute.CopyAtom
    key_rows: cute.Tensor
    value: cute.CopyAtom
    value_rows: cute.Tensor


class Forward(ForwardKernel):
    """The kernel of one plan."""

    def worker(self, arena, bounds, scale_log2):
        """What an attending warpgroup works with."""
        plan = self.plan
        attending = plan.role("attend")
        groups = attending.warps * cute.arch.WARP_SIZE // mma.GROUP_THREADS
        thread = self.thread(attending)
        group = cute.arch.make_warp_uniform(thread // mma.GROUP_THREADS)
        query_source = mma.REGISTERS if plan.query_in_registers else mma.SHARED
        scores_mma = mma.tiled_product(self.dtype, groups, plan.tile_n, mma.K_MAJOR, query_source)
        output_mma = mma.tiled_product(self.dtype, groups, plan.head_dim_v, mma.MN_MAJOR, mma.REGISTERS)
        query, key, value = (self.tile(arena, name) for name in TILES)
        ops = Operands(plan, scores_mma, output_mma, thread, query, key, transposed(value))
        turn = Turn.of(plan, group)
        first_row = mma.first_row(thread)
        softmax = OnlineSoftmax(plan.softmax, scale_log2)
        return Worker(plan, ops, softmax, turn, bounds, (first_row, first_row + 8))

    def store(self, arena, bounds, outputs, ops):
        """How the output leaves: through shared memory if the plan has room for it."""
        if not any(buffer.name == "output" for buffer in self.plan.buffers):
            return ExchangedStore(self.plan, bounds, outputs)
        staging = Staging(ops.output_mma, ops.thread, self.tile(arena, "output")[None, None, 0])
        return StagedStore(self.plan, bounds, outputs, staging)

    @cute.jit
    def __call__(  # noqa: D102 - ``compile_plan`` documents the arguments
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        softmax_scale: Float32,
        window_left: Int32,
        window_right: Int32,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        batch_order: cute.Tensor | None,
        counter: cute.Tensor | None,
        ctas: Int32,
        stream,
    ):
        plan = self.plan
        query = tma.rows_first(q, plan.cu_seqlens_q)
        key = tma.rows_first(k, plan.cu_seqlens_k)
        value = tma.rows_first(v, plan.cu_seqlens_k)
        vectors = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, batch_order)
        lengths = self.lengths(query, key, vectors)
        if cutlass.const_expr(self.bounded_keys):
            key, value = tma.bounded_rows(key), tma.bounded_rows(value)
        copies = Copies(
            *self.atom("query", query),
            *self.atom("key", key),
            *self.atom("value", value),
        )
        scalars = Scalars(softmax_scale * math.LOG2_E, window_left, window_right)
        self.kernel(copies, Outputs(out, lse, counter), lengths, scalars).launch(
            grid=[ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, copies: Copies, outputs: Outputs, lengths: Lengths, scalars: Scalars):
        """Allocate, then give each warp its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        arena = Arena(plan)
        rings = arena.rings()
        if warp == 0:
            initialise(rings)
        cute.arch.sync_threads()

        bounds = self.bounds(scalars)
        words = arena.words("tile")
        order = TileOrder(plan, bounds, lengths)
        stream = TileStream(plan, order, words, Consumer(rings["tile"]))
        loading, scheduling, attending = (plan.role(name) for name in ("load", "schedule", "attend"))
        if warp < attending.first_warp:
            reallocate(plan, loading)
            if warp == loading.first_warp:
                ends = tuple(Producer(rings[name]) for name in TILES)
                load(stream, lengths.group, self.row_tiles(arena, copies), ends)
            elif warp == scheduling.first_warp:
                run_schedule(
                    order,
                    tile_source(plan, outputs.counter, rings, arena),
                    Producer(rings["tile"]),
                    words,
                )
        else:
            reallocate(plan, attending)
            worker = self.worker(arena, bounds, scalars.scale_log2)
            ends = tuple(Consumer(rings[name]) for name in TILES)
            attend(stream, worker, self.store(arena, bounds, outputs, worker.ops), ends)
