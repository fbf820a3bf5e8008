"""Forward attention on Hopper: what a CTA owns, and which warps do what."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, mma, tma
from attn4.kernels.dsl.channel import Consumer, Producer, Turn
from attn4.kernels.dsl.smem import Arena, row_major_layout, transposed
from attn4.kernels.shared.call import DTYPES, Outputs, Scalars
from attn4.kernels.shared.scheduler import Lengths, TileOrder, run_schedule
from attn4.kernels.shared.softmax import OnlineSoftmax
from attn4.kernels.shared.tiles import Bounds
from attn4.kernels.sm90.forward.attend import Worker, attend
from attn4.kernels.sm90.forward.load import load
from attn4.kernels.sm90.forward.operands import GROUP_THREADS, Operands
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


@dataclass(frozen=True)
class Tiles:
    """The record of the announced tile in shared memory, and query heads a K/V head."""

    words: cute.Tensor
    group: Int32


class Forward:
    """The kernel of one plan."""

    def __init__(self, plan):
        self.plan = plan
        self.dtype = DTYPES[plan.dtype]

    @property
    def bounded_keys(self) -> bool:
        """Whether a sequence's keys can end before the tensor does."""
        return self.plan.cu_seqlens_k or self.plan.seqused_k

    def layout(self, name: str):
        """Shared-memory layout of a tile buffer."""
        buffer = self.plan.buffer(name)
        return row_major_layout(buffer.shape, buffer.stages, self.dtype)

    def tile(self, arena, name: str):
        """A tile buffer as a tensor."""
        return arena.tile(name, self.layout(name), self.dtype)

    def query_atom(self, query):
        """The copy of query tiles, of one head or of a whole group."""
        shape = self.plan.buffer("query").shape
        if self.plan.pack_gqa > 1:
            return tma.packed_copy_atom(query, self.layout("query"), shape, self.plan.pack_gqa)
        return tma.copy_atom(query, self.layout("query"), shape)

    def row_tiles(self, arena, copies):
        """The copies of Q, K and V into their slots."""
        query, key, value = (self.tile(arena, name) for name in TILES)
        pack, bounded = self.plan.pack_gqa, self.bounded_keys
        return (
            tma.RowTiles(copies.query, copies.query_rows, query, pack=pack),
            tma.RowTiles(copies.key, copies.key_rows, key, bounded=bounded),
            tma.RowTiles(copies.value, copies.value_rows, value, bounded=bounded),
        )

    def worker(self, arena, bounds, scale_log2):
        """What an attending warpgroup works with."""
        plan = self.plan
        attending = plan.role("attend")
        groups = attending.warps * cute.arch.WARP_SIZE // GROUP_THREADS
        thread = cute.arch.thread_idx()[0] - attending.first_warp * cute.arch.WARP_SIZE
        group = cute.arch.make_warp_uniform(thread // GROUP_THREADS)
        query_source = mma.REGISTERS if plan.query_in_registers else mma.SHARED
        scores_mma = mma.tiled_product(self.dtype, groups, plan.tile_n, mma.K_MAJOR, query_source)
        output_mma = mma.tiled_product(self.dtype, groups, plan.head_dim_v, mma.MN_MAJOR, mma.REGISTERS)
        query, key, value = (self.tile(arena, name) for name in TILES)
        ops = Operands(plan, scores_mma, output_mma, thread, query, key, transposed(value))
        turn = Turn(next((channel for channel in plan.channels if channel.name == "turn"), None), group)
        first_row = mma.first_row(thread)
        softmax = OnlineSoftmax(plan.softmax, scale_log2)
        return Worker(plan, ops, softmax, turn, bounds, (first_row, first_row + 8))

    def store(self, arena, bounds, outputs, ops):
        """How the output leaves: through shared memory if the plan has room for it."""
        if not any(buffer.name == "output" for buffer in self.plan.buffers):
            return ExchangedStore(self.plan, bounds, outputs)
        staging = self.tile(arena, "output")[None, None, 0]
        return StagedStore(self.plan, bounds, outputs, ops.output_mma, ops.thread, staging)

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
        counter: cute.Tensor | None,
        ctas: Int32,
        stream,
    ):
        plan = self.plan
        query = tma.rows_first(q, plan.cu_seqlens_q)
        key = tma.rows_first(k, plan.cu_seqlens_k)
        value = tma.rows_first(v, plan.cu_seqlens_k)
        batch = query.shape[3]
        if cutlass.const_expr(plan.cu_seqlens_q):
            batch = cu_seqlens_q.shape[0] - 1
        heads = query.shape[2] // plan.pack_gqa
        lengths = Lengths(
            batch,
            heads,
            heads // key.shape[2],
            query.shape[0],
            key.shape[0],
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
        )
        if cutlass.const_expr(self.bounded_keys):
            key, value = tma.bounded_rows(key), tma.bounded_rows(value)
        copies = Copies(
            *self.query_atom(query),
            *tma.copy_atom(key, self.layout("key"), plan.buffer("key").shape),
            *tma.copy_atom(value, self.layout("value"), plan.buffer("value").shape),
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
            with cute.arch.elect_one():
                for ring in rings.values():
                    ring.initialise()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        bounds = Bounds(
            plan.mask, plan.tile_m, plan.tile_n, plan.pack_gqa, scalars.window_left, scalars.window_right
        )
        words = arena.words("tile")
        loading, scheduling, attending = (plan.role(name) for name in ("load", "schedule", "attend"))
        if warp < attending.first_warp:
            cute.arch.setmaxregister_decrease(loading.registers)
            if warp == loading.first_warp:
                ends = (Consumer(rings["tile"]), *(Producer(rings[name]) for name in TILES))
                load(Tiles(words, lengths.group), self.row_tiles(arena, copies), ends)
            elif warp == scheduling.first_warp:
                order = TileOrder(plan, bounds, lengths)
                run_schedule(order, plan, outputs.counter, Producer(rings["tile"]), words)
        else:
            cute.arch.setmaxregister_increase(attending.registers)
            worker = self.worker(arena, bounds, scalars.scale_log2)
            ends = tuple(Consumer(rings[name]) for name in ("tile", *TILES))
            attend(worker, words, self.store(arena, bounds, outputs, worker.ops), ends)
