"""Reads of global memory that no one wrote, in allocations that were registered as not written."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

from attn4.emulator.hazards.findings import Hazard
from attn4.emulator.state.memory import GlobalMemory, Unwritten

if TYPE_CHECKING:
    from attn4.emulator.grid import Grid
    from attn4.emulator.ptx.module import Instruction


def watch_outputs(grid: Grid, memory: GlobalMemory) -> None:
    """Report such reads to the findings of a grid, as long as it runs."""

    def told(read: Unwritten) -> None:
        _report(grid, read)

    for allocation in memory.tracked():
        allocation.on_unwritten = told


def _report(grid: Grid, read: Unwritten) -> None:
    i, warp = _executing(grid), grid.running
    lane = None if read.lanes is None or warp is None else int(read.lanes[0])
    what = "a copy" if i is None else i.name
    offset = int(read.addresses[0]) - read.memory.base
    name, count = read.memory.name, len(read.addresses)
    message = f"{what} reads {count} bytes of {name}, the first at offset {offset}, which no one wrote"
    grid.findings.add(
        Hazard(
            "unwritten",
            message,
            grid.program.kernel.name,
            (0, 0, 0) if warp is None else warp.block.index,
            -1 if warp is None else warp.numbers[0 if lane is None else lane // 32],
            None if lane is None else lane % 32,
            0 if i is None else i.line,
            None if i is None or i.source is None else str(i.source),
            barrier=read.memory.name,
        )
    )


def _executing(grid: Grid) -> Instruction | None:
    """The instruction whose generated code is being executed."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == grid.program.filename:
            return grid.program.instruction_at(frame.f_lineno)
        frame = frame.f_back
    return None
