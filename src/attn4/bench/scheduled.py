"""attn4's kernels under other schedules than the plan's, to see what a schedule is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from attn4 import get_scheduler_metadata
from attn4.artifact import kernel_for
from attn4.bench.cases import Case
from attn4.bench.inputs import Inputs
from attn4.ops import gpu
from attn4.ops.call import NO_VECTORS, Options
from attn4.ops.check import checked
from attn4.ops.schedule import SchedulerMetadata
from attn4.plan.choose import choose
from attn4.plan.launch_control import with_launch_control
from attn4.plan.makespan import alternatives
from attn4.reference import Lengths

TAKEN_OVER = "taken over"
"""The schedule by cluster launch control."""


def under(schedule: str, case: Case, inputs: Inputs) -> Callable[[Inputs], Tensor]:
    """A call of ``case`` whose plan has the schedule of that name in ``plan/makespan.py``, or launch control.

    Raises ValueError where the plan cannot have it.
    """
    cu = inputs.cu_seqlens
    hint = case.seqlen if case.packed else None
    options = Options(
        causal=case.mask.kind == "causal",
        window_size=(case.mask.left, case.mask.right),
        max_seqlen_q=hint,
        max_seqlen_k=hint,
    )
    call = checked(inputs.q, inputs.k, inputs.v, Lengths(cu_seqlens_q=cu, cu_seqlens_k=cu), options)
    machine = gpu.machine_of(inputs.q.get_device())
    plan = choose(call.problem(), machine)
    plan = with_launch_control(plan) if schedule == TAKEN_OVER else alternatives(plan)[schedule]
    launch = replace(gpu.prepare(call), kernel=kernel_for(plan), counted=plan.schedule.counted)
    order = metadata(case, inputs).batch_order if plan.schedule.sorted_batches else None

    def attend(x: Inputs) -> Tensor:
        vectors = (x.cu_seqlens, x.cu_seqlens, None, None, order) if case.packed else NO_VECTORS
        out: Tensor = launch(x.q, x.k, x.v, vectors, None)
        return out

    return attend


def metadata(case: Case, inputs: Inputs) -> SchedulerMetadata:
    """The order of the sequences of ``case``, made once."""
    return get_scheduler_metadata(
        max_seqlen_q=case.seqlen,
        max_seqlen_k=case.seqlen,
        num_heads_q=case.heads,
        num_heads_kv=case.kv_heads,
        headdim=case.head_dim,
        qkv_dtype=inputs.q.dtype,
        cu_seqlens_q=inputs.cu_seqlens,
        cu_seqlens_k=inputs.cu_seqlens,
        window_size=(case.mask.left, case.mask.right),
    )
