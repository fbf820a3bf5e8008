"""A case on an emulated device, under a schedule, hazards looked for, judged by the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attn4.emulator
from case_inputs import Inputs
from judge import eager, judge, oracle
from problem_case import Case

MOST_PRODUCTS = 3_000_000
"""Query-key pairs of a case that the emulator finishes in seconds."""


def attended(
    case: Case,
    arch: str = "sm_100a",
    *,
    inputs: Inputs | None = None,
    schedule: Any = "random",
    seed: int = 3,
    hazards: bool = True,
) -> Any:
    """The public function on the emulated device ``arch``, judged; the device.

    ``inputs``: instead of those that the case makes.
    """
    given = case.inputs("cpu") if inputs is None else inputs
    with attn4.emulator.device(arch, schedule=schedule, seed=seed, sms=2, hazards=hazards) as gpu:
        result = case.run(given, backend="emulator")
    out, lse = result if case.lse else (result, None)
    judge_as_fused(case, given, out, lse)
    assert gpu.hazards == []
    return gpu


def judge_as_fused(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> None:
    """`judge` against float64, by the yardstick of torch with scores in float32: closer than torch's own."""
    judge(out, lse, oracle(case, inputs, torch.float64), eager(case, inputs, torch.float32))


def is_small(case: Case) -> bool:
    """Whether the emulator finishes it in seconds, once its kernel is there."""
    rows = case.q_shape[-3] * (1 if case.lens_q else case.batch)
    return case.launches and rows * case.k_shape[-3] * case.heads <= MOST_PRODUCTS
