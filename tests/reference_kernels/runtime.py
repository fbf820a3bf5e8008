"""Any program of CuTe-DSL kernels over CPU tensors, run on the emulator: the one place that knows how.

A process emulates one architecture, and opens the device before it imports cutlass: the program and its
libraries remember what they were first told of the machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from attn4.emulator.grid import Limits, Residency
from attn4.emulator.launch import IN_PROCESS, HostCode, device_attributes, emulation, jit_runtime
from attn4.emulator.launch.tensors import on_device
from attn4.emulator.runner import Runner
from attn4.emulator.schedule import Schedule

CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}


@contextmanager
def device(arch: str, schedule: Schedule, *, sms: int, seconds: float) -> Iterator[Runner]:
    """A device of ``sms`` multiprocessors for programs that take what torch calls the current GPU.

    Raises whatever a launch raises; a launch that takes more than ``seconds`` is given up.
    """
    with jit_runtime(arch):
        import cutlass.cute as cute
        from cutlass.cute import runtime

    runner = Runner(schedule, Residency(sms=sms), Limits(seconds=seconds))
    attributes = device_attributes(arch)
    compiler = cute.compile

    def compiled(*arguments: Any, **options: Any) -> HostCode:
        with tempfile.TemporaryDirectory() as folder:
            kept = f" --gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}"
            options["options"] = options.get("options", "") + kept
            found = compiler(*arguments, **options)
            IN_PROCESS.add(found.__cubin__, found.__ptx__)
        return HostCode(found, IN_PROCESS, attributes)

    major, minor = CAPABILITY[arch]
    properties = SimpleNamespace(multi_processor_count=sms, major=major, minor=minor)
    with (
        emulation(runner, attributes),
        patch.object(cute, "compile", compiled),
        patch.object(runtime._Tensor, "__init__", _on_device(runtime._Tensor.__init__)),
        patch("cutlass.utils.HardwareInfo", lambda *_: _Hardware(sms)),
        patch.object(torch.Tensor, "is_cuda", property(lambda _: True)),
        patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            get_device_capability=lambda *_: (major, minor),
            get_device_properties=lambda *_: properties,
        ),
    ):
        yield runner


class _Hardware:
    """What cutlass asks of the driver."""

    def __init__(self, sms: int) -> None:
        self._sms = sms

    def get_device_multiprocessor_count(self) -> int:
        return self._sms

    def get_max_active_clusters(self, cluster_size: int) -> int:
        return self._sms // cluster_size

    def get_l2_cache_size_in_bytes(self) -> int:
        return 50 * 2**20


def _on_device(initialise: Callable[..., None]) -> Callable[..., None]:
    """Tensors that the DSL compiles for are on the device: their pointers are global ones."""

    def labelled(tensor: Any, source: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(source, torch.Tensor) and type(source) is torch.Tensor:
            source, _ = on_device(source, 0)
        initialise(tensor, source, *arguments, **options)

    return labelled
