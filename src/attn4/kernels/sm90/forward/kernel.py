"""Forward attention on Hopper: what a CTA owns, and which warps do what."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32

from attn4.kernels.dsl import math, mma, tma
from attn4.kernels.dsl.channel import Consumer, Producer, Turn
from attn4.kernels.dsl.smem import Arena, row_major_layout, transposed
from attn4.kernels.shared.scheduler import Lengths, TileOrder, run_schedule
from attn4.kernels.shared.softmax import OnlineSoftmax
from attn4.kernels.shared.tiles import Bounds
from attn4.kernels.sm90.forward.attend import Worker, attend
from attn4.kernels.sm90.forward.load import load
from attn4.kernels.sm90.forward.operands import GROUP_THREADS, Operands
from attn4.kernels.sm90.forward.store import ExchangedStore, StagedStore

DTYPES = {"bfloat16": BFloat16, "float16": Float16}


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
class Outputs:
    """Where results go; ``lse`` is None in a kernel without it."""

    out: cute.Tensor
    lse: cute.Tensor | None
    counter: cute.Tensor


@dataclass(frozen=True)
class Scalars:
    """Numbers of a call: score scale in log2 units and the window's bounds."""

    scale_log2: Float32
    window_left: Int32
    window_right: Int32


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
        self.groups = plan.role("attend").warps * 32 // GROUP_THREADS

    @property
    def bounded_keys(self) -> bool:
        """Whether a sequence's keys can end before the tensor does."""
        return self.plan.cu_seqlens_k or self.plan.seqused_k

    def layouts(self):
        """Shared-memory layouts of Q, K and V."""
        names = ("query", "key", "value")
        buffers = [self.plan.buffer(name) for name in names]
        return [row_major_layout(b.shape, b.stages, self.dtype) for b in buffers]

    def products(self):
        """The tiled products S = Q K^T and O = P V."""
        plan = self.plan
        return (
            mma.tiled_product(
                self.dtype,
                self.groups,
                plan.tile_n,
                mma.K_MAJOR,
                mma.REGISTERS if plan.query_in_registers else mma.SHARED,
            ),
            mma.tiled_product(self.dtype, self.groups, plan.head_dim_v, mma.MN_MAJOR, mma.REGISTERS),
        )

    def store(self, arena, bounds, outputs, ops):
        """How the output leaves: through shared memory if the plan has room for it."""
        if not any(buffer.name == "output" for buffer in self.plan.buffers):
            return ExchangedStore(self.plan, bounds, outputs)
        layout = row_major_layout(self.plan.buffer("output").shape, 1, self.dtype)
        staging = arena.tile("output", layout, self.dtype)[None, None, 0]
        return StagedStore(self.plan, bounds, outputs, ops.output_mma, ops.thread, staging)

    @cute.jit
    def __call__(
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
        counter: cute.Tensor,
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
        heads, kv_heads = query.shape[2], key.shape[2]
        lengths = Lengths(
            batch,
            heads,
            heads // kv_heads,
            query.shape[0],
            key.shape[0],
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
        )
        if cutlass.const_expr(self.bounded_keys):
            key, value = tma.bounded_rows(key), tma.bounded_rows(value)
        query_layout, key_layout, value_layout = self.layouts()
        copies = Copies(
            *tma.load_atom(query, query_layout, (plan.tile_m, plan.head_dim)),
            *tma.load_atom(key, key_layout, (plan.tile_n, plan.head_dim)),
            *tma.load_atom(value, value_layout, (plan.tile_n, plan.head_dim_v)),
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

        layouts = self.layouts()
        query, key, value = (
            arena.tile(name, layout, self.dtype)
            for name, layout in zip(("query", "key", "value"), layouts, strict=True)
        )
        words = cute.make_tensor(arena.pointer("tile", Int32), cute.make_layout(plan.buffer("tile").shape[0]))
        tiles = Tiles(words, lengths.group)
        bounds = Bounds(
            plan.mask, plan.tile_m, plan.tile_n, plan.pack_gqa, scalars.window_left, scalars.window_right
        )
        roles = {role.name: role for role in plan.roles}
        if warp < roles["attend"].first_warp:
            cute.arch.setmaxregister_decrease(roles["load"].registers)
            if warp == roles["load"].first_warp:
                rows = (
                    tma.RowTiles(copies.query, copies.query_rows, (plan.tile_m, plan.head_dim), query, False),
                    tma.RowTiles(
                        copies.key, copies.key_rows, (plan.tile_n, plan.head_dim), key, self.bounded_keys
                    ),
                    tma.RowTiles(
                        copies.value,
                        copies.value_rows,
                        (plan.tile_n, plan.head_dim_v),
                        value,
                        self.bounded_keys,
                    ),
                )
                ends = (Consumer(rings["tile"]), *(Producer(rings[n]) for n in ("query", "key", "value")))
                load(tiles, *rows, ends)
            elif warp == roles["schedule"].first_warp:
                order = TileOrder(plan, bounds, lengths)
                run_schedule(order, plan, outputs.counter, Producer(rings["tile"]), words)
        else:
            cute.arch.setmaxregister_increase(roles["attend"].registers)
            thread = cute.arch.thread_idx()[0] - roles["attend"].first_warp * 32
            group = cute.arch.make_warp_uniform(thread // GROUP_THREADS)
            row = thread // 32 * 16 + thread % 32 // 4
            ops = Operands(plan, *self.products(), group, query, key, transposed(value))
            softmax = OnlineSoftmax(plan.softmax, scalars.scale_log2)
            turn = Turn(next((c for c in plan.channels if c.name == "turn"), None), group)
            worker = Worker(plan, ops, softmax, turn, bounds, (row, row + 8))
            store = self.store(arena, bounds, outputs, ops)
            ends = tuple(Consumer(rings[n]) for n in ("tile", "query", "key", "value"))
            attend(worker, tiles, store, ends)
