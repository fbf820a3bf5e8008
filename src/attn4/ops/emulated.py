"""Kernels on the emulator: for tensors of the CPU, as slow as an interpreter, as strict as it can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn4.artifact import artifact_for
from attn4.artifact.emulated import emulated, load_emulated
from attn4.plan.plan import Plan

ARCHITECTURE = "sm_90a"
"""Which kernels run: the only architecture that has some."""

CTAS = 4
"""How many multiprocessors a kernel is told of: enough for tiles to be dealt, few enough to be quick."""


def emulated_kernel(plan: Plan) -> Callable[..., None]:
    """The kernel of ``plan``, run by the emulator at each call, its warps in turn.

    Raises what ``artifact_for`` raises where there is neither a compiled kernel nor a compiler.
    """
    artifact = artifact_for(plan)

    def call(*arguments: Any) -> None:
        from attn4.emulator.runner import Runner

        with emulated(Runner()):
            load_emulated(artifact)(*arguments)

    return call
