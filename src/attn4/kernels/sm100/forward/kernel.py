"""Forward attention on Blackwell: what a CTA owns, and which warps do what."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, tma
from attn4.kernels.dsl.carried import Bundle
from attn4.kernels.dsl.channel import Consumer, Producer, initialise
from attn4.kernels.dsl.pair import Pair, launch_shape
from attn4.kernels.dsl.registers import reallocate
from attn4.kernels.dsl.smem import Arena, transposed
from attn4.kernels.dsl.tensor_memory import TensorArena
from attn4.kernels.shared.call import ForwardKernel, Outputs, Scalars
from attn4.kernels.shared.scheduler import Lengths, TileOrder, run_schedule, tile_source
from attn4.kernels.shared.stream import TileStream
from attn4.kernels.sm100.forward.correction import Corrector, correct
from attn4.kernels.sm100.forward.load import load
from attn4.kernels.sm100.forward.mma import Products, multiply
from attn4.kernels.sm100.forward.softmax import RowSoftmax, soften
from attn4.kernels.sm100.forward.store import store

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


class Forward(ForwardKernel):
    """The kernel of one plan."""

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
        result = tma.rows_first(out, plan.cu_seqlens_q)
        if cutlass.const_expr(plan.cu_seqlens_q):
            result = tma.bounded_rows(result)
        vectors = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, batch_order)
        lengths = self.lengths(query, key, vectors)
        if cutlass.const_expr(self.bounded_keys):
            key, value = tma.bounded_rows(key), tma.bounded_rows(value)
        copies = Copies(
            *self.atom("query", query),
            *self.atom("key", key),
            *self.atom("value", value),
            *self.atom("out", result, tma.STORE),
        )
        scalars = Scalars(softmax_scale * math.LOG2_E, window_left, window_right)
        if cutlass.const_expr(plan.schedule.launch_control):
            ctas = TileOrder(plan, None, lengths).total
        self.kernel(copies, Outputs(out, lse, counter), lengths, scalars).launch(
            **launch_shape(ctas, plan.cta_group),
            block=[plan.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, copies: Copies, outputs: Outputs, lengths: Lengths, scalars: Scalars):
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
        words = arena.words("tile") if cutlass.const_expr(plan.schedule.dynamic) else None
        place = (rings, words, bounds, lengths)

        # One branch a role: nothing of the later ones is alive in registers while an earlier one runs.
        softening, correcting = plan.role("softmax0"), plan.role("correction")
        if warp < correcting.first_warp:
            reallocate(plan, softening)
            index = warp // softening.warps
            thread = cute.arch.thread_idx()[0] - index * WARPGROUP
            memory = (tensor, arena.rows("row_stats", Float32, index))
            row = RowSoftmax(plan, bounds, scalars.scale_log2, index, memory, thread)
            soften(self.stream(place), row, self.softmax_ends(rings, index))
        elif warp < multiplying:
            reallocate(plan, correcting)
            stats = [arena.rows("row_stats", Float32, i) for i in range(plan.query_tiles)]
            memory = (tensor, stats, self.tile(arena, "out"))
            corrector = Corrector(plan, bounds, scalars, outputs, memory, self.thread(correcting))
            correct(self.stream(place), corrector, self.correction_ends(rings))
        else:
            reallocate(plan, plan.role("mma"))
            if pair.leads(warp == multiplying):
                query, key, value = (self.tile(arena, name) for name in ("query", "key", "value"))
                products = Products(plan, self.dtype, (query, key, transposed(value)), tensor)
                multiply(self.stream(place), products, self.mma_ends(rings))
            elif warp == plan.role("store").first_warp:
                staged = self.tile(arena, "out")
                out = tma.RowTiles(copies.out, copies.out_rows, staged, plan.cu_seqlens_q, plan.pack_gqa)
                store(self.stream(place), out, self.store_ends(rings))
            elif warp == plan.role("load").first_warp:
                ends = Bundle(**self.tile_ends(rings, Producer))
                load(self.stream(place), lengths.group, self.row_tiles(arena, copies, pair.rank), ends)
            elif cutlass.const_expr(plan.schedule.dynamic):
                order = TileOrder(plan, bounds, lengths)
                source = tile_source(plan, outputs.counter, rings, arena)
                run_schedule(order, source, Producer(rings["tile"]), words)
        pair.synchronise()
        if warp == multiplying:
            tensor.free()

    def stream(self, place):
        """A role's own way through the tiles."""
        rings, words, bounds, lengths = place
        announced = Consumer(rings["tile"]) if self.plan.schedule.dynamic else None
        return TileStream(self.plan, TileOrder(self.plan, bounds, lengths), words, announced)

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

    def tile_ends(self, rings, side):
        """One side of the rings of Q, K and V, which K and V may share."""
        return {name: side(rings[name]) for name in ("query", "key_value", "key", "value") if name in rings}

    def mma_ends(self, rings):
        """What the multiplying warp takes and hands over."""
        ends = self.tile_ends(rings, Consumer)
        for i in range(self.plan.query_tiles):
            ends[f"scores{i}"] = Producer(rings[f"scores{i}"])
            ends[f"output{i}"] = Producer(rings[f"output{i}"])
            ends[f"rescaled{i}"] = Consumer(rings[f"rescaled{i}"])
            ends[f"probabilities{i}"] = Consumer(rings[f"probabilities{i}"])
            ends[f"late{i}"] = Consumer(rings[f"probabilities{i}_last"])
        return Bundle(**ends)
