"""A device block: what is launched in it runs on the emulator, whoever launches it and however."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from attn4.emulator.grid import Grid, Limits, Residency
from attn4.emulator.hazards.findings import Hazard
from attn4.emulator.launch import bindings, dsl, torch_cuda
from attn4.emulator.launch.device import Chip
from attn4.emulator.launch.driver import Emulation, emulation
from attn4.emulator.launch.patches import Patches
from attn4.emulator.launch.tensors import bytes_of
from attn4.emulator.launch.torch_device import CudaOnCpu
from attn4.emulator.report.report import Report, report
from attn4.emulator.runner import Runner
from attn4.emulator.schedule import Schedule, named

_patches = Patches(torch_cuda.patches, bindings.patches, dsl.patches)


@dataclass(slots=True)
class Gpu:
    """An emulated device and what has run on it."""

    chip: Chip
    runner: Runner
    _emulation: Emulation
    _roles: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def grids(self) -> list[Grid]:
        """Every launch in order, with its counts."""
        return self.runner.grids

    @property
    def report(self) -> Report:
        """What every launch did, by role and class of instruction."""
        return report(self.grids, self._roles, self._emulation.roles)

    def roles(self, warps: Mapping[str, Sequence[int]]) -> None:
        """Name the roles that reports tell apart: the warps of each, counted in the CTA, of kernels whose
        launcher has not named them. What is not named is grouped by the code that it runs.
        """
        self._roles = {name: tuple(members) for name, members in warps.items()}

    def poison(self, *tensors: Any) -> None:
        """Fill contiguous CPU tensors with poison; they count as unwritten until a launch writes them.

        A kernel that reads what no launch has written is reported, where hazards are looked for.
        """
        for tensor in tensors:
            self.runner.poison(bytes_of(tensor))

    @property
    def hazards(self) -> list[Hazard]:
        """What was found wrong in them: where they ran on, and what they ended with if they did not."""
        found: list[Hazard] = []
        for grid in self.grids:
            found += grid.findings
            found += [grid.failure] if grid.failure is not None else []
        return found


@contextmanager
def opened(
    arch: str,
    *,
    schedule: str | Schedule,
    seed: int,
    hazards: bool | str,
    sms: int,
    limits: Limits | None,
    processes: int,
    exact: bool,
) -> Iterator[Gpu]:
    """See `attn4.emulator.device`."""
    if isinstance(hazards, str) and hazards != "strict":
        raise ValueError(f"hazards={hazards!r}: there are False, True and 'strict'")
    chip = Chip.of(arch, sms)
    policy = named(schedule, seed) if isinstance(schedule, str) else schedule
    residency = Residency(sms=sms, device_sms=max(sms, Chip.of(arch).sms))
    runner = Runner(
        policy,
        residency,
        limits or Limits(),
        hazards=bool(hazards),
        strict=hazards == "strict",
        exact=exact,
        chip=chip,
        processes=processes,
    )
    watcher = dsl.Watcher({dsl.PACKAGE, dsl.PROVIDER}, _patches.refresh)
    sys.meta_path.insert(0, watcher)
    try:
        with _patches.held(), CudaOnCpu(), emulation(runner, chip=chip) as emulated:
            yield Gpu(chip, runner, emulated)
    finally:
        sys.meta_path.remove(watcher)
