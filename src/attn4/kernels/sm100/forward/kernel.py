"""Forward attention on Blackwell: what a CTA owns, and which warps do what."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, tma
from attn4.kernels.dsl.carried import Bundle
from attn4.kernels.dsl.channel import Consumer, Producer
from attn4.kernels.dsl.smem import Arena, row_major_layout, transposed
from attn4.kernels.dsl.tensor_memory import TensorArena
from attn4.kernels.shared.call import DTYPES, Outputs, Scalars
from attn4.kernels.shared.scheduler import Lengths, TileOrder, run_schedule
from attn4.kernels.shared.tiles import Bounds
from attn4.kernels.sm100.forward.correction import Corrector, correct
from attn4.kernels.sm100.forward.load import load
from attn4.kernels.sm100.forward.mma import Products, multiply
from attn4.kernels.sm100.forward.softmax import RowSoftmax, soften
from attn4.kernels.sm100.forward.store import store
from attn4.kernels.sm100.forward.tiles import TileStream

WARPGROUP = 128


@dataclass(frozen=True)
class Copies:
    """The four bulk copies, each an atom and the coordinates of its tensor."""

    query: cute.CopyAtom
    query_rows: cute.Tensor
    key: cute.CopyAtom
    key_rows: cute.Tensor
    value: cute.CopyAtom
    value_rows: cute.Tensor
    out: cute.CopyAtom
    out_rows: cute.Tensor


class Forward:
    """The kernel of one plan."""

    def __init__(self, plan):
        self.plan = plan
        self.dtype = DTYPES[plan.dtype]

    @property
    def bounded_keys(self) -> bool:
        """Whether a sequence's keys can end before the tensor does."""
        return self.plan.cu_seqlens_k or self.plan.seqused_k

    def slots(self, name: str) -> str:
        """The buffer that holds the tiles of ``name``."""
        rings = ("key_value", name) if name in ("key", "value") else (name,)
        return next(buffer.name for buffer in self.plan.buffers if buffer.name in rings)

    def layout(self, name: str):
        """Shared-memory layout of the tiles of ``name``."""
        buffer = self.plan.buffer(self.slots(name))
        return row_major_layout(buffer.shape, buffer.stages, self.dtype)

    def tile(self, arena, name: str):
        """The tiles of ``name`` as a tensor."""
        return arena.tile(self.slots(name), self.layout(name), self.dtype)

    def atom(self, name: str, rows, direction=tma.LOAD):
        """The copy of tiles of ``name``; query and output rows may be those of a group of heads."""
        shape = self.plan.buffer(self.slots(name)).shape
        if self.plan.pack_gqa > 1 and name in ("query", "out"):
            return tma.packed_copy_atom(rows, self.layout(name), shape, self.plan.pack_gqa, direction)
        return tma.copy_atom(rows, self.layout(name), shape, direction)

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
        result = tma.rows_first(out, plan.cu_seqlens_q)
        batch = query.shape[3]
        if cutlass.const_expr(plan.cu_seqlens_q):
            batch = cu_seqlens_q.shape[0] - 1
            result = tma.bounded_rows(result)
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
            *self.atom("query", query),
            *self.atom("key", key),
            *self.atom("value", value),
            *self.atom("out", result, tma.STORE),
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
        tensor = TensorArena(plan, arena.pointer("tensor_address", Int32))
        multiplying = plan.role("mma").first_warp
        if warp == multiplying:
            with cute.arch.elect_one():
                for ring in rings.values():
                    ring.initialise()
            cute.arch.mbarrier_init_fence()
            tensor.allocate()
        cute.arch.sync_threads()
        tensor.open()

        bounds = Bounds(
            plan.mask, plan.tile_m, plan.tile_n, plan.pack_gqa, scalars.window_left, scalars.window_right
        )
        words = arena.words("tile") if cutlass.const_expr(plan.schedule.dynamic) else None
        place = (rings, words, bounds, lengths)

        role = plan.role("softmax0")
        if warp < role.warps * plan.query_tiles:
            cute.arch.setmaxregister_increase(role.registers)
            index = warp // role.warps
            thread = cute.arch.thread_idx()[0] - index * WARPGROUP
            memory = (tensor, arena.rows("row_stats", Float32, index))
            row = RowSoftmax(plan, bounds, scalars.scale_log2, index, memory, thread)
            soften(self.stream(place), row, self.softmax_ends(rings, index))
        role = plan.role("correction")
        if warp >= role.first_warp and warp < role.first_warp + role.warps:
            cute.arch.setmaxregister_decrease(role.registers)
            stats = [arena.rows("row_stats", Float32, i) for i in range(plan.query_tiles)]
            memory = (tensor, stats, self.tile(arena, "out"))
            corrector = Corrector(plan, bounds, scalars, outputs, memory, self.thread(role))
            correct(self.stream(place), corrector, self.correction_ends(rings))
        if warp >= multiplying:
            cute.arch.setmaxregister_decrease(plan.role("mma").registers)
        if warp == multiplying:
            shared = (
                self.tile(arena, "query"),
                self.tile(arena, "key"),
                transposed(self.tile(arena, "value")),
            )
            multiply(self.stream(place), Products(plan, self.dtype, shared, tensor), self.mma_ends(rings))
        if warp == plan.role("store").first_warp:
            pack = plan.pack_gqa
            out = tma.RowTiles(
                copies.out, copies.out_rows, self.tile(arena, "out"), bounded=plan.cu_seqlens_q, pack=pack
            )
            store(self.stream(place), out, self.store_ends(rings))
        if warp == plan.role("load").first_warp:
            row_tiles = (
                tma.RowTiles(copies.query, copies.query_rows, self.tile(arena, "query"), pack=plan.pack_gqa),
                tma.RowTiles(copies.key, copies.key_rows, self.tile(arena, "key"), bounded=self.bounded_keys),
                tma.RowTiles(
                    copies.value, copies.value_rows, self.tile(arena, "value"), bounded=self.bounded_keys
                ),
            )
            names = [name for name in ("query", "key_value", "key", "value") if name in rings]
            load(
                self.stream(place),
                lengths.group,
                row_tiles,
                Bundle(**{name: Producer(rings[name]) for name in names}),
            )
        if cutlass.const_expr(plan.schedule.dynamic):
            if warp == plan.role("schedule").first_warp:
                order = TileOrder(plan, bounds, lengths)
                run_schedule(order, plan, outputs.counter, Producer(rings["tile"]), words)
        cute.arch.sync_threads()
        if warp == multiplying:
            tensor.free()

    def stream(self, place):
        """A role's own way through the tiles."""
        rings, words, bounds, lengths = place
        announced = Consumer(rings["tile"]) if self.plan.schedule.dynamic else None
        return TileStream(self.plan, TileOrder(self.plan, bounds, lengths), words, announced)

    def thread(self, role):
        """Number of this thread in its warpgroup."""
        return cute.arch.thread_idx()[0] - role.first_warp * cute.arch.WARP_SIZE

    def softmax_ends(self, rings, index):
        """What the softmax warpgroup of query tile ``index`` takes and hands over."""

        def ring(name: str):
            first = rings[name.format(0)]
            return first.beside(rings[name.format(1)], index) if self.plan.query_tiles == 2 else first

        return Bundle(
            scores=Consumer(ring("scores{}")),
            probabilities=Producer(ring("probabilities{}")),
            late=Producer(ring("probabilities{}_last")),
            row_stats=Producer(ring("row_stats{}")),
        )

    def correction_ends(self, rings):
        """What the correction warpgroup takes and hands over."""
        ends = {"out": Producer(rings["out"])}
        if self.plan.output_in_query:
            ends["query"] = Consumer(rings["query"])
        for i in range(self.plan.query_tiles):
            ends[f"row_stats{i}"] = Consumer(rings[f"row_stats{i}"])
            ends[f"output{i}"] = Consumer(rings[f"output{i}"])
            ends[f"rescaled{i}"] = Producer(rings[f"rescaled{i}"])
        return Bundle(**ends)

    def store_ends(self, rings):
        """What the storing warp takes."""
        names = ("out", "query") if self.plan.output_in_query else ("out",)
        return Bundle(**{name: Consumer(rings[name]) for name in names})

    def mma_ends(self, rings):
        """What the multiplying warp takes and hands over."""
        names = [name for name in ("query", "key_value", "key", "value") if name in rings]
        ends = {name: Consumer(rings[name]) for name in names}
        for i in range(self.plan.query_tiles):
            ends[f"scores{i}"] = Producer(rings[f"scores{i}"])
            ends[f"output{i}"] = Producer(rings[f"output{i}"])
            ends[f"rescaled{i}"] = Consumer(rings[f"rescaled{i}"])
            ends[f"probabilities{i}"] = Consumer(rings[f"probabilities{i}"])
            ends[f"late{i}"] = Consumer(rings[f"probabilities{i}_last"])
        return Bundle(**ends)
