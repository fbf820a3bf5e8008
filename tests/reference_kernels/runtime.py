"""An emulated device for the reference's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attn4 import emulator
from attn4.emulator.gpu import Gpu
from attn4.emulator.grid import Limits
from attn4.emulator.schedule import Schedule


@contextmanager
def device(
    arch: str, schedule: Schedule, *, sms: int, seconds: float, hazards: bool = False
) -> Iterator[Gpu]:
    """`attn4.emulator.device` on which a launch that takes more than ``seconds`` is given up.

    Libraries remember the architecture of the first device that they meet: a process has one.
    """
    limits = Limits(seconds=seconds)
    with emulator.device(arch, schedule=schedule, sms=sms, limits=limits, hazards=hazards) as gpu:
        yield gpu
