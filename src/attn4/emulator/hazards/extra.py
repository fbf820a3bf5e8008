"""Operations that are put between those of a kernel to look at its registers, and what they report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.findings import Hazard
from attn4.emulator.isa.registry import Operation
from attn4.emulator.ptx.module import Instruction, Operand

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Check = Callable[..., None]

_OPCODE = "watch"
"""No instruction of PTX has it."""


@dataclass(frozen=True, slots=True)
class Extra:
    """``function(warp, mask, *values)`` beside an instruction; the values are those of ``sources``."""

    beside: Instruction
    function: Check
    sources: tuple[Operand, ...] = ()

    def operation(self) -> Operation:
        """As an operation that code is generated for."""
        marker = replace(self.beside, opcode=_OPCODE, modifiers=(), operands=(), guard=None)
        return Operation(marker, self.function, True, (), self.sources, (None,) * len(self.sources))


def where_guarded(beside: Instruction, function: Check) -> Extra:
    """A function of (warp, mask), called if any lane passes the guard of ``beside``, with those lanes."""
    guard = beside.guard
    if guard is None:
        return Extra(beside, function)

    def run(warp: Warp, mask: Mask, values: Mask) -> None:
        lanes = mask & (~values if guard.negated else values)
        if lanes.any():
            function(warp, lanes)

    return Extra(beside, run, (guard.register,))


def report(
    warp: Warp, place: int, beside: Instruction, kind: str, message: str, other: Instruction | None = None
) -> None:
    """Add a hazard of the thread at ``place`` among those of a warp to the findings of its grid."""
    grid: Any = warp.block.grid
    source = None if beside.source is None else str(beside.source)
    hazard = Hazard(
        kind,
        message,
        warp.program.kernel.name,
        warp.block.index,
        warp.numbers[place // 32],
        place % 32,
        beside.line,
        source,
        "" if other is None else described(other),
    )
    grid.findings.add(hazard, other_line=0 if other is None else other.line)


def described(i: Instruction) -> str:
    """An instruction by its name and place, for a message."""
    return f"{i.name} at PTX line {i.line}" + (f" ({i.source})" if i.source else "")
