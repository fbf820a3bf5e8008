"""``device="cuda"`` where a device is emulated: tensors in the CPU's memory, which is that device's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attn4.emulator.launch.errors import LaunchError

_CPU = torch.device("cpu")


class CudaOnCpu(TorchFunctionMode):
    """Creates and moves on the CPU what was to be on device 0 of CUDA; fake tensors stay where they are."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """The call with its device changed, if it names one."""
        given = dict(options or {})
        if names_cuda(given.get("device")) and not _faking():
            given["device"] = _CPU
        if function is torch.Tensor.cuda and not _faking():
            return arguments[0]
        if function is torch.Tensor.to and len(arguments) > 1 and names_cuda(arguments[1]) and not _faking():
            arguments = (arguments[0], _CPU, *arguments[2:])
        return function(*arguments, **given)


def names_cuda(device: Any) -> bool:
    """Whether a device, given as torch takes it, is CUDA's. Raises LaunchError for another than number 0."""
    if isinstance(device, str) and device.startswith("cuda"):
        device = torch.device(device)
    if not isinstance(device, torch.device) or device.type != "cuda":
        return False
    if device.index:
        raise LaunchError(f"A tensor was to be on {device}: one device is emulated, number 0.")
    return True


def _faking() -> bool:
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
