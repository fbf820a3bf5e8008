"""The plan that attn4 runs on a case, in a line for the row."""

from __future__ import annotations

import torch

from attn4.artifact import plan_key
from attn4.bench.cases import Case
from attn4.machine import Machine
from attn4.ops.gpu import machine_of
from attn4.plan.choose import choose, unsupported
from attn4.plan.plan import Plan


def device_machine(device: torch.device) -> Machine | None:
    """The machine model of a GPU, or None for a CPU and for a GPU that attn4 does not know."""
    if device.type != "cuda":
        return None
    try:
        return machine_of(torch.cuda.current_device() if device.index is None else device.index)
    except NotImplementedError:
        return None


def plan_summary(case: Case, device: torch.device) -> str | None:
    """The chosen plan and its key, or None where there is none."""
    model = device_machine(device)
    if model is None or unsupported(case.problem(), model):
        return None
    plan = choose(case.problem(), model)
    return f"{describe(plan)} key {plan_key(plan)[:12]}"


def describe(plan: Plan) -> str:
    """Tile, roles and schedule, such as ``128x176, load 4w 24r, attend 8w 240r, longest_first dynamic``."""
    roles = ", ".join(f"{role.name} {role.warps}w {role.registers}r" for role in plan.roles)
    kind = "dynamic" if plan.schedule.dynamic else "persistent" if plan.schedule.persistent else "static"
    packing = f", packs {plan.pack_gqa} heads" if plan.pack_gqa > 1 else ""
    return f"{plan.tile_m}x{plan.tile_n}, {roles}, {plan.schedule.order} {kind}{packing}"
