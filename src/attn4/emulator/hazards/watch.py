"""What the units and definitions of the machine tell when hazards are looked for: a grid has one Watch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn4.emulator.hazards.findings import Findings

if TYPE_CHECKING:
    from attn4.emulator.grid import Grid


class Watch:
    """Follows one launch. ``findings`` is where it reports."""

    def __init__(self, grid: Grid, findings: Findings) -> None:
        self.grid = grid
        self.findings = findings
