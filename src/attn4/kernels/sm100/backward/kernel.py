"""Backward attention on Blackwell: what a CTA owns, and which warps do what."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import tma
from attn4.kernels.dsl.carried import Bundle
from attn4.kernels.dsl.channel import Consumer
from attn4.kernels.dsl.registers import reallocate
from attn4.kernels.dsl.smem import Arena
from attn4.kernels.dsl.tensor_memory import TensorArena
from attn4.kernels.shared.gradient_call import BackwardKernel, Copy, GradientScalars, Results, Workspace
from attn4.kernels.shared.gradient_load import load
from attn4.kernels.shared.key_tiles import count_key_tiles, find_key_tile
from attn4.kernels.shared.postprocess import Postprocess
from attn4.kernels.shared.preprocess import Preprocess
from attn4.kernels.shared.query_blocks import first_block
from attn4.kernels.shared.scheduler import Lengths
from attn4.kernels.sm100.backward.gradient import KeyGradient, differentiate
from attn4.kernels.sm100.backward.mma import Products, multiply
from attn4.kernels.sm100.backward.reduce import GROUP, Slices, reduce
from attn4.kernels.sm100.backward.store import store


@dataclass(frozen=True)
class Copies:
    """The six bulk copies."""

    query: Copy
    key: Copy
    value: Copy
    dout: Copy
    dk_out: Copy
    dv_out: Copy


class Backward(BackwardKernel):
    """The kernels of one plan: row statistics, the gradients, and dQ rounded."""

    @cute.jit
    def __call__(  # noqa: D102 - ``compile_plan`` documents the arguments
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        minus_lse: cute.Tensor,
        minus_delta: cute.Tensor,
        dq_sum: cute.Tensor,
        softmax_scale: Float32,
        window_left: Int32,
        window_right: Int32,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        stream,
    ):
        plan = self.plan
        query, out, dout, dq = (tma.rows_first(x, plan.cu_seqlens_q) for x in (q, out, dout, dq))
        key, value, dk, dv = (tma.rows_first(x, plan.cu_seqlens_k) for x in (k, v, dk, dv))
        lengths = self.lengths(query, key, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
        results = Results(out, dout, lse, dlse)
        workspace = Workspace(minus_lse, minus_delta, dq_sum)
        Preprocess(plan).launch(results, workspace, lengths, stream)
        if cutlass.const_expr(plan.cu_seqlens_k):
            dk, dv = tma.bounded_rows(dk), tma.bounded_rows(dv)
        copies = Copies(
            **self.operand_copies(query, key, value, dout),
            dk_out=Copy(*self.atom("dk_out", dk, tma.STORE)),
            dv_out=Copy(*self.atom("dv_out", dv, tma.STORE)),
        )
        scalars = GradientScalars(softmax_scale, window_left, window_right)
        self.kernel(copies, workspace, lengths, scalars).launch(
            grid=[count_key_tiles(plan, lengths), 1, 1],
            block=[plan.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
        Postprocess(plan).launch(workspace, dq, lengths, softmax_scale, stream)

    @cute.kernel
    def kernel(self, copies: Copies, workspace: Workspace, lengths: Lengths, scalars: GradientScalars):
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

        bounds = self.bounds(scalars)
        tile = find_key_tile(plan, bounds, lengths, cute.arch.block_idx()[0])
        group = lengths.group
        if tile.key_block >= 0:
            first = first_block(plan, lengths, tile.batch)
            role = plan.role("reduce")
            if warp < role.warps:
                reallocate(plan, role)
                slices = Slices(plan, tensor.lanes("dq"), self.slices(arena), self.thread(role))
                sums = cute.domain_offset((0, first, 0), workspace.dq_sum)
                reduce(tile, bounds, group, sums, slices, self.ends(rings, "reduce"))
            role = plan.role("compute")
            if warp >= role.first_warp and warp < role.first_warp + role.warps:
                reallocate(plan, role)
                gradient = KeyGradient(plan, bounds, scalars, self.shared(arena), tensor, self.thread(role))
                differentiate(tile, group, gradient, self.ends(rings, "compute"))
            if warp >= multiplying:
                reallocate(plan, plan.role("mma"))
            if warp == multiplying:
                names = ("key", "value", "query", "dout", "dscores_shared")
                products = Products(plan, self.dtype, [self.tile(arena, name) for name in names], tensor)
                multiply((tile.last - tile.first) * group, products, self.mma_ends(rings))
            if warp == plan.role("load").first_warp:
                tiles = self.row_tiles(arena, copies)
                ends = self.ends(rings, "load")
                load(plan, tile, group, tiles, self.row_stats(arena, workspace, first), ends)
                store(tile, tiles, ends)
        cute.arch.sync_threads()
        if warp == multiplying:
            tensor.free()

    def mma_ends(self, rings):
        """Those of the multiplying warp, which takes each block of queries twice: for S, and later for dK."""
        ends = self.ends(rings, "mma")
        return Bundle(
            used_query=Consumer(rings["query"]), **{name: getattr(ends, name) for name in ends.carried}
        )

    def shared(self, arena):
        """What the computing role reads and writes in shared memory."""
        out = {"dk": self.tile(arena, "dk_out"), "dv": self.tile(arena, "dv_out")}
        return self.statistics(arena), self.tile(arena, "dscores_shared"), out

    def row_tiles(self, arena, copies):
        """The copies of operands into their slots, and of dK and dV out of theirs."""
        results = {
            name: self.copy_tiles(arena, copies, name, self.plan.cu_seqlens_k)
            for name in ("dk_out", "dv_out")
        }
        return {**self.operand_tiles(arena, copies), **results}

    def slices(self, arena):
        """Slots of slices of dQ: (columns of a group, groups, rows, slots), as the sums are laid out."""
        buffer = self.plan.buffer("dq_slice")
        rows, columns = buffer.shape
        shape = (GROUP, columns // GROUP, rows, buffer.stages)
        layout = cute.make_layout(shape, stride=(1, rows * GROUP, GROUP, rows * columns))
        return cute.make_tensor(arena.pointer("dq_slice", Float32), layout)
