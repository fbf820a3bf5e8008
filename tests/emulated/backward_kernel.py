"""attn4's own backward kernels, run on the emulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn4.artifact import artifact_for
from attn4.artifact.emulated import emulated, load_emulated
from attn4.emulator.grid import Grid, Residency
from attn4.emulator.hazards.findings import Hazard
from attn4.emulator.runner import Runner
from attn4.emulator.schedule import Random, Schedule
from attn4.machine import machine
from attn4.plan.choose import choose
from attn4.plan.plan import Plan
from attn4.plan.workspace import workspace
from case_inputs import Inputs
from gradient_judge import (
    Gradients,
    Incoming,
    eager_gradients,
    gradient_oracle,
    incoming,
    judge_gradients,
)
from problem_case import Case

UNBOUNDED = 2**30


@dataclass(frozen=True, slots=True)
class Run:
    """What the kernels gave, dQ as float32 sums (heads, blocks, elements) too, and the grids that ran."""

    gradients: Gradients
    dq_sum: Tensor
    grids: tuple[Grid, ...]

    @property
    def findings(self) -> list[Hazard]:
        return [finding for grid in self.grids for finding in grid.findings]


def backward_plan(case: Case, deterministic: bool = False, arch: str = "sm_100a") -> Plan:
    """The plan of single CTAs."""
    problem = replace(case.problem(), direction="backward", deterministic=deterministic)
    return choose(problem, machine(arch), cta_group=1)


def pair_plan(case: Case, *, deterministic: bool = False, dq_first: bool = False) -> Plan:
    """The plan of pairs of CTAs on Blackwell, in either order of their products."""
    problem = replace(case.problem(), direction="backward", deterministic=deterministic)
    return replace(choose(problem, machine("sm_100a"), cta_group=2), dq_first=dq_first)


def differentiate(
    case: Case,
    inputs: Inputs,
    given: Incoming,
    schedule: Schedule,
    *,
    hazards: bool = True,
    deterministic: bool = False,
    arch: str = "sm_100a",
    sms: int = 2,
    plan: Plan | None = None,
) -> Run:
    """One backward pass under ``schedule``; what is not written stays NaN. ``plan``: not the default one."""
    plan = plan or backward_plan(case, deterministic, arch)
    heads, rows = inputs.q.shape[-2], inputs.q.shape[-3]
    lengths = [
        inputs.lengths.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    ]
    batch = inputs.q.shape[0] if lengths[0] is None else len(lengths[0]) - 1
    room = workspace(plan, batch, heads, rows)
    own = [torch.full(shape, torch.nan) for shape in (room.row_stats, room.row_stats, room.dq_sum)]
    counter = torch.zeros(2, dtype=torch.int32)
    gradients = _unwritten(inputs.q), _unwritten(inputs.k), _unwritten(inputs.v)
    runner = Runner(schedule, Residency(sms=sms), hazards=hazards)
    sides = (case.mask.left, case.mask.right)
    bounds = [UNBOUNDED if side is None else max(-UNBOUNDED, min(side, UNBOUNDED)) for side in sides]
    with emulated(runner):
        kernel = load_emulated(artifact_for(plan))
        kernel(
            *(inputs.q, inputs.k, inputs.v, given.out, given.dout, given.lse, given.dlse),
            *gradients,
            *own,
            case.softmax_scale,
            *bounds,
            *lengths,
            counter if plan.schedule.counted else None,
            sms,
        )
    assert counter.tolist() == [0, 0], "the next launch needs its counter at zero"
    return Run(gradients, own[2][..., : plan.tile_m * plan.head_dim], tuple(runner.grids))


def judged(case: Case, schedule: Schedule, dout: Tensor | None = None, **options: Any) -> Run:
    """One backward pass, judged, without a hazard; ``dout`` instead of the gradient that the case makes."""
    inputs = case.inputs("cpu")
    given = incoming(case, inputs)
    given = given if dout is None else replace(given, dout=dout)
    run = differentiate(case, inputs, given, schedule, **options)
    judge_gradients(
        run.gradients, gradient_oracle(case, inputs, given), eager_gradients(case, inputs, given), given
    )
    assert run.findings == [], run.findings[:3]
    return run


def sum_bits(case: Case, seeds: Iterable[int], **options: Any) -> list[Tensor]:
    """The bits of the sums of dQ under random schedules, all CTAs resident; hazards are looked for once."""
    inputs = case.inputs("cpu")
    given = incoming(case, inputs)
    found = []
    for seed in seeds:
        run = differentiate(case, inputs, given, Random(seed), sms=8, hazards=seed == 0, **options)
        assert run.findings == [], run.findings[:3]
        found.append(run.dq_sum.view(torch.int32))
    return found


def _unwritten(x: Tensor) -> Tensor:
    return torch.full(x.shape, torch.nan, dtype=x.dtype)
