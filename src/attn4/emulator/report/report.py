"""The report of a device block: each kernel that ran, each of its roles, and what they did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.report.classes import CLASSES, amounts

if TYPE_CHECKING:
    from attn4.emulator.codegen.program import Program
    from attn4.emulator.grid import Grid

Roles = Mapping[str, Sequence[int]]
Counts = dict[str, int]

ALIKE = 0.8
"""Warps are of one role if this much of the instructions they execute is the same."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One launch. ``roles`` and ``counts`` hold the classes of `CLASSES` that are not zero, ``warps`` the
    warps of each role.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    warps: dict[str, tuple[int, ...]]
    roles: dict[str, Counts]
    counts: Counts
    peak_tensor_columns: int
    hazards: int

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": list(self.block),
            "cluster": list(self.cluster),
            "total": self.counts,
            "roles": {
                name: {"warps": list(self.warps[name])} | counts for name, counts in self.roles.items()
            },
            "peak tensor columns": self.peak_tensor_columns,
        }

    def __str__(self) -> str:
        name = self.kernel if len(self.kernel) <= 70 else self.kernel[:67] + "..."
        shape = f"grid {_times(self.grid)}, block {_times(self.block)}"
        if self.cluster != (1, 1, 1):
            shape += f", cluster {_times(self.cluster)}"
        if self.peak_tensor_columns:
            shape += f", {self.peak_tensor_columns} columns of tensor memory at most"
        return "\n".join([name, f"  {shape}", *(f"  {line}" for line in self._table())])

    def _table(self) -> list[str]:
        columns = [*self.roles, "all"]
        counts = [*self.roles.values(), self.counts]
        rows = [["", *columns]]
        rows += [
            [name, *(f"{column.get(name, 0):,}" if column.get(name) else "." for column in counts)]
            for name in CLASSES
            if self.counts.get(name)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(_aligned(row, widths)) for row in rows]


@dataclass(frozen=True, slots=True)
class Report:
    """Every launch of a block, in order."""

    kernels: tuple[KernelReport, ...]

    @property
    def total(self) -> Counts:
        """All launches together."""
        return _sum(kernel.counts for kernel in self.kernels)

    def to_dict(self) -> list[dict[str, Any]]:
        """The same as plain data, for JSON."""
        return [kernel.to_dict() for kernel in self.kernels]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.kernels)) if self.kernels else "nothing was launched"


def report(
    grids: Sequence[Grid], roles: Roles | None = None, of_kernels: Mapping[str, Roles] | None = None
) -> Report:
    """What has run. ``roles`` names warps of a CTA, ``of_kernels`` those of kernels of that name; the others,
    or all, are grouped by the code they run.
    """
    own = of_kernels or {}
    return Report(tuple(_kernel(grid, own.get(grid.program.kernel.name, roles or {})) for grid in grids))


def _kernel(grid: Grid, named: Roles) -> KernelReport:
    visits = grid.tally.by_warp()
    counts = {warp: _counts(grid, warp, seen) for warp, seen in visits.items()}
    warps = _grouped(grid.program, visits, named)
    return KernelReport(
        kernel=grid.program.kernel.name,
        grid=grid.shape.grid,
        block=grid.shape.block,
        cluster=grid.shape.cluster,
        warps=warps,
        roles={name: _sum(counts[warp] for warp in members) for name, members in warps.items()},
        counts=_sum(counts.values()),
        peak_tensor_columns=grid.tally.peak_tensor_columns,
        hazards=len(grid.findings),
    )


def _counts(grid: Grid, warp: int, visits: NDArray[np.int64]) -> dict[str, float]:
    found = dict(grid.tally.amounts.get(warp, {}))
    for number in np.flatnonzero(visits).tolist():
        for name, amount in _of_segment(grid.program, number).items():
            found[name] = found.get(name, 0) + amount * int(visits[number])
    return found


def _of_segment(program: Program, number: int) -> Mapping[str, float]:
    known = program.amounts.get(number)
    if known is None:
        segment = program.segments[number]
        instructions = [operation.instruction for _, operation in segment.operations]
        if segment.jump is not None:
            instructions.append(segment.jump)
        known = {}
        for instruction in instructions:
            for name, amount in amounts(instruction).items():
                known[name] = known.get(name, 0) + amount
        program.amounts[number] = known
    return known


def _grouped(
    program: Program, visits: Mapping[int, NDArray[np.int64]], named: Roles
) -> dict[str, tuple[int, ...]]:
    """Roles: those that were named, as far as they exist, then those found, by their warps."""
    groups = {name: tuple(w for w in warps if w in visits) for name, warps in named.items()}
    groups = {name: warps for name, warps in groups.items() if warps}
    taken = {warp for warps in groups.values() for warp in warps}
    sizes = np.array(program.sizes)
    found: list[tuple[NDArray[np.float64], list[int]]] = []
    for warp, seen in visits.items():
        if warp in taken:
            continue
        profile = seen * sizes / max((seen * sizes).sum(), 1)
        for other, members in found:
            if np.minimum(profile, other).sum() >= ALIKE:
                members.append(warp)
                break
        else:
            found.append((profile, [warp]))
    for _, members in found:
        groups[_name(members)] = tuple(members)
    return groups


def _name(warps: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for warp in warps:
        if spans and spans[-1][1] == warp - 1:
            spans[-1][1] = warp
        else:
            spans.append([warp, warp])
    listed = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
    return f"{'warps' if len(warps) > 1 else 'warp'} {listed}"


def _sum(parts: Any) -> Counts:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return {name: round(total[name]) for name in CLASSES if total.get(name)}


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
