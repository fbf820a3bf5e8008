"""attn4's own forward kernels, run on the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attn4.artifact import Artifact, artifact_for, plan_from_json
from attn4.artifact.emulated import emulated, load_emulated
from attn4.emulator.grid import Grid, Residency
from attn4.emulator.runner import Runner
from attn4.emulator.schedule import Schedule
from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan import sm100
from attn4.plan.channels import validate
from attn4.plan.choose import choose
from attn4.plan.launch_control import with_launch_control
from attn4.plan.plan import Plan
from attn4.plan.sorting import sorting_plan, with_sorted_batches
from attn4.problem import Problem
from attn4.reference import Lengths, dense

UNBOUNDED = 2**30
MASKS = {"full": Mask(), "causal": Mask(None, 0), "window": Mask(90, 40)}


@dataclass(frozen=True, slots=True)
class Case:
    """One call; ``lens_q`` and ``lens_k`` make it packed. ``ctas``: how many SMs the kernel is told of."""

    head_dim: int
    mask: str
    seqlen_q: int
    seqlen_k: int
    heads: int = 1
    kv_heads: int = 1
    lens_q: tuple[int, ...] | None = None
    lens_k: tuple[int, ...] | None = None
    ctas: int = 2
    arch: str = "sm_90a"
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of the plan that differ from the chosen ones."""
    sorted: bool = False
    """Whether the pre-pass sorts the sequences."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of ``attn4.plan.sm100.forward``, which builds the plan if there are any."""
    takes_over: bool = False
    """Whether tiles come by cluster launch control; ``ctas`` does not matter then."""

    @property
    def packed(self) -> bool:
        return self.lens_q is not None


@cache
def artifact(case: Case) -> Artifact:
    """Compiled once, or taken from the user's cache."""
    problem = Problem(
        batch=len(case.lens_q) if case.lens_q else 1,
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim,
        mask=MASKS[case.mask],
        cu_seqlens_q=case.packed,
        cu_seqlens_k=case.packed,
    )
    target = machine(case.arch)
    plan = choose(problem, target)
    if case.options:
        plan = sm100.forward(problem, target, **dict(case.options))
        validate(plan, target)
    plan = replace(plan, **dict(case.changes))
    plan = with_launch_control(plan) if case.takes_over else plan
    return artifact_for(with_sorted_batches(plan) if case.sorted else plan)


def _shape(case: Case, rows: int, heads: int) -> tuple[int, ...]:
    return (rows, heads, case.head_dim) if case.packed else (1, rows, heads, case.head_dim)


def _starts(lens: tuple[int, ...] | None) -> Tensor | None:
    return None if lens is None else torch.tensor([0, *lens]).cumsum(0).int()


@dataclass(frozen=True, slots=True)
class Result:
    """What the kernel gave, what the oracle gives, and the grid that ran."""

    out: Tensor
    lse: Tensor
    expected: Tensor
    expected_lse: Tensor
    grid: Grid

    @property
    def error(self) -> float:
        """Relative L2 error of the output."""
        return ((self.out.float() - self.expected).norm() / self.expected.norm()).item()


def normal_inputs(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of a call."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, heads: int) -> Tensor:
        return torch.randn(_shape(case, rows, heads), generator=generator).bfloat16()

    rows_k = sum(case.lens_k) if case.lens_k else case.seqlen_k
    q = normal(sum(case.lens_q) if case.lens_q else case.seqlen_q, case.heads)
    return q, normal(rows_k, case.kv_heads), normal(rows_k, case.kv_heads)


def with_jump(case: Case, height: float, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """`normal_inputs` of one sequence; its first key, which comes last, adds ``height`` to the logit of
    ``row`` and to no other.
    """
    q, k, v = normal_inputs(case)
    q[..., 0], k[..., 0] = 0, 0
    q[:, row, :, 0] = 64
    k[:, 0, :, 0] = height * case.head_dim**0.5 / 64
    return q, k, v


def attend(
    case: Case,
    schedule: Schedule,
    *,
    sms: int = 4,
    seed: int = 0,
    hazards: bool = False,
    inputs: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Result:
    """Run one call under ``schedule``, of ``inputs`` or of normal ones; what is not written stays NaN."""
    q, k, v = normal_inputs(case, seed) if inputs is None else inputs
    rows_q = q.shape[-3]
    out = torch.full_like(q, torch.nan)
    lse = torch.full((case.heads, rows_q) if case.packed else (1, case.heads, rows_q), torch.nan)
    found = artifact(case)
    plan = plan_from_json(found.description.plan)
    counter = torch.zeros(2, dtype=torch.int32) if plan.schedule.counted else None
    lengths = (*map(_starts, (case.lens_q, case.lens_k)), None, None)
    runner = Runner(schedule, Residency(sms=sms), hazards=hazards)
    scale = case.head_dim**-0.5
    with emulated(runner):
        order = batch_order(plan, lengths) if case.sorted else None
        kernel = load_emulated(found)
        mask = MASKS[case.mask]
        bounds = tuple(UNBOUNDED if side is None else side for side in (mask.left, mask.right))
        kernel(q, k, v, out, lse, scale, *bounds, *lengths, order, counter, case.ctas)
    starts = lengths[:2]
    assert counter is None or not counter.any(), "the kernel leaves its counter at zero"
    expected, expected_lse = dense(
        q, k, v, softmax_scale=scale, mask=MASKS[case.mask], lengths=_lengths(starts)
    )
    return Result(out, lse, expected, expected_lse, runner.grids[-1])


def batch_order(plan: Plan, lengths: tuple[Tensor | None, ...], rows: tuple[int, int] = (0, 0)) -> Tensor:
    """What the pre-pass of ``plan`` writes; ``rows`` are those of padded queries and keys."""
    entries = next(x.numel() - (n < 2) for n, x in enumerate(lengths) if x is not None)
    order = torch.full((entries + 1,), -1, dtype=torch.int32)
    kernel = load_emulated(artifact_for(sorting_plan(plan)))
    kernel(order, *rows, UNBOUNDED, UNBOUNDED, *lengths)
    return order


def _lengths(starts: tuple[Tensor | None, Tensor | None]) -> Lengths | None:
    return None if starts[0] is None else Lengths(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
