"""An emulated device for programs of CuTe-DSL kernels that take the tensors of a GPU and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from attn4 import emulator
from attn4.emulator.gpu import Gpu
from attn4.emulator.grid import Limits
from attn4.emulator.schedule import Schedule


@contextmanager
def device(
    arch: str, schedule: Schedule, *, sms: int, seconds: float, hazards: bool = False
) -> Iterator[Gpu]:
    """`attn4.emulator.device` in which CPU tensors say that they are on the GPU. A launch that takes more
    than ``seconds`` is given up.

    Libraries remember the architecture of the first device that they meet: a process has one.
    """
    limits = Limits(seconds=seconds)
    with (
        emulator.device(arch, schedule=schedule, sms=sms, limits=limits, hazards=hazards) as gpu,
        patch.object(torch.Tensor, "is_cuda", property(lambda _: True)),
    ):
        yield gpu
