"""A program written for a GPU, run as ``__main__`` on the emulator, unmodified.

Tensors that it puts on "cuda" stay on the CPU, where the emulated device finds them, and it is told that no
launch took any time.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from attn4 import emulator
from attn4.emulator.gpu import Gpu
from attn4.emulator.schedule import Schedule


class CudaIsHere(TorchFunctionMode):
    """Whatever names a CUDA device means the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {name: _here(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*map(_here, args), **options)


def _here(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return torch.device("cpu") if is_device and torch.device(value).type == "cuda" else value


def run_program(path: Path, arguments: list[str], arch: str, schedule: Schedule, *, hazards: bool) -> Gpu:
    """Run a Python file with command-line ``arguments``; returns the device that it ran on.

    A process is good for one architecture. Raises whatever the program or one of its kernels raises,
    SystemExit for a status other than 0.
    """
    with emulator.device(arch, schedule=schedule, hazards=hazards, sms=4) as gpu:
        from cutlass.cute import testing

        with (
            CudaIsHere(),
            patch.object(testing, "benchmark", lambda *_, **__: 0.0),
            patch.object(sys, "argv", [str(path), *arguments]),
            patch.object(sys, "path", [str(path.parent), *sys.path]),
        ):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise
    return gpu
