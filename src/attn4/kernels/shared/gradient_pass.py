"""The backward pass of either machine: three launches, of which the second is the machine's own."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import tma
from attn4.kernels.dsl.pair import launch_shape
from attn4.kernels.shared.gradient_call import BackwardKernel, Gradients, GradientScalars, Results, Workspace
from attn4.kernels.shared.key_tiles import count_key_tiles
from attn4.kernels.shared.postprocess import Postprocess
from attn4.kernels.shared.preprocess import Preprocess


class GradientPass(BackwardKernel):
    """Row statistics, the gradients, and dQ rounded.

    A machine gives ``prepared``, its kernel called with what it needs: rows are (rows, dim, heads, batch).
    """

    def grid(self, lengths, ctas):
        """Grid and cluster: a CTA for each tile of keys and share of columns, of a persistent kernel no more
        than ``ctas``.
        """
        plan = self.plan
        tiles = count_key_tiles(plan, lengths) * plan.column_shares * plan.cta_group
        return launch_shape(cutlass.min(ctas, tiles) if plan.schedule.persistent else tiles, plan.cta_group)

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
        counter: cute.Tensor | None,
        ctas: Int32,
        stream,
    ):
        plan = self.plan
        query, out, dout, dq = (tma.rows_first(x, plan.cu_seqlens_q) for x in (q, out, dout, dq))
        key, value, dk, dv = (tma.rows_first(x, plan.cu_seqlens_k) for x in (k, v, dk, dv))
        lengths = self.lengths(query, key, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
        workspace = Workspace(minus_lse, minus_delta, dq_sum)
        Preprocess(plan).launch(Results(out, dout, lse, dlse), workspace, lengths, stream)
        operands = self.operand_copies(query, key, value, dout)
        scalars = GradientScalars(softmax_scale, window_left, window_right)
        self.prepared(operands, Gradients(dk, dv), workspace, lengths, scalars, counter).launch(
            **self.grid(lengths, ctas),
            block=[plan.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
        Postprocess(plan).launch(workspace, dq, lengths, softmax_scale, stream)
