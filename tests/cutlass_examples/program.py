"""A program written for a GPU, run as ``__main__`` on the emulator, unmodified."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from attn4 import emulator
from attn4.emulator.gpu import Gpu
from attn4.emulator.schedule import Schedule


def run_program(path: Path, arguments: list[str], arch: str, schedule: Schedule, *, hazards: bool) -> Gpu:
    """Run a Python file with command-line ``arguments``; returns the device that it ran on.

    A process is good for one architecture. Raises whatever the program or one of its kernels raises,
    SystemExit for a status other than 0.
    """
    with (
        emulator.device(arch, schedule=schedule, hazards=hazards, sms=4) as gpu,
        patch.object(sys, "argv", [str(path), *arguments]),
        patch.object(sys, "path", [str(path.parent), *sys.path]),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return gpu
