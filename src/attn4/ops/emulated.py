"""Kernels on the emulator: for tensors of the CPU, as slow as an interpreter, as strict as it can be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from attn4.artifact import artifact_for
from attn4.artifact.emulated import emulated, load_emulated
from attn4.plan.plan import Plan

ARCHITECTURE = "sm_90a"
"""What runs outside of a device block."""

OUTPUTS = {
    ("attention", "forward"): slice(3, 5),
    ("attention", "backward"): slice(7, 13),
    ("sort_batches", "forward"): slice(0, 1),
}
"""Which arguments a kernel writes before anything reads them: out and LSE; the gradients and what leads to
them; the order."""

CTAS = 4
"""How many multiprocessors a kernel is told of there: enough to deal tiles to, few enough to be quick."""


def architecture(backend: str | None, arch: str | None) -> str | None:
    """``arch``, if the emulator is asked for the default.

    While torch.compile traces, the default stays None: it is that of the block in which the graph runs.
    """
    if arch is not None or backend != "emulator" or torch.compiler.is_dynamo_compiling():
        return arch
    device = _device()
    return ARCHITECTURE if device is None else str(device.chip.arch)


def emulated_kernel(plan: Plan) -> Callable[..., None]:
    """The kernel of ``plan``, run by the emulator at each call: on the device of the block that the call is
    in, otherwise on one of its own, its warps in turn.

    Raises what ``artifact_for`` raises where there is neither a compiled kernel nor a compiler.
    """
    artifact = artifact_for(plan)
    roles = {role.name: range(role.first_warp, role.first_warp + role.warps) for role in plan.roles}

    def call(*arguments: Any) -> None:
        device = _device()
        if device is not None:
            device.roles.update(dict.fromkeys((k.name for k in artifact.description.kernels), roles))
            _poison(device, arguments[OUTPUTS[plan.kernel, plan.direction]])
            if plan.schedule.persistent:
                # The last argument is how many CTAs a persistent grid has.
                arguments = (*arguments[:-1], device.chip.sms)
            load_emulated(artifact)(*arguments)
            return
        from attn4.emulator.runner import Runner

        with emulated(Runner()):
            load_emulated(artifact)(*arguments)

    return call


def _poison(device: Any, outputs: tuple[Any, ...]) -> None:
    """Let what the kernel is to write count as unwritten, so that a read of it is a hazard."""
    from attn4.emulator.launch.tensors import bytes_of

    for output in outputs:
        if output is not None and output.numel():
            device.run.poison(bytes_of(output))


def _device() -> Any:
    """The device block that this is in, None without one; nothing is imported to find out."""
    driver = sys.modules.get("attn4.emulator.launch.driver")
    return None if driver is None else driver.emulated_device()
