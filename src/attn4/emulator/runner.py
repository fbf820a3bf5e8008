"""Launches as host code made them, run on the machine: PTX parsed once, its tensors made addressable, then
the grid.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from attn4.emulator import spread
from attn4.emulator.grid import Grid, Limits, Residency, Shape
from attn4.emulator.launch.device import Chip
from attn4.emulator.launch.errors import LaunchError
from attn4.emulator.launch.record import Allocation, Launch
from attn4.emulator.machine import Machine
from attn4.emulator.ptx.module import Kernel, Module
from attn4.emulator.ptx.parser import parse
from attn4.emulator.schedule import RoundRobin, Schedule
from attn4.emulator.state.memory import GlobalMemory
from attn4.emulator.state.poison import Poisoned


@dataclass(slots=True)
class Runner:
    """A function of a Launch that runs it to its end under one schedule. ``grids`` keeps what has run, for
    reports, also of a launch that failed. ``hazards``: look for them; each grid has its ``findings``.
    ``strict`` and ``exact`` are those of `Machine`. ``chip``, if given, refuses kernels compiled for another.
    ``processes``: as many share the CTAs of a launch where `spread` allows it.
    """

    schedule: Schedule = field(default_factory=RoundRobin)
    residency: Residency = field(default_factory=Residency)
    limits: Limits = field(default_factory=Limits)
    grids: list[Grid] = field(default_factory=list)
    hazards: bool = False
    exact: bool = False
    chip: Chip | None = None
    strict: bool = False
    processes: int = 1
    _modules: dict[str, tuple[Module, Machine]] = field(default_factory=dict)
    _poisoned: Poisoned = field(default_factory=Poisoned)

    def poison(self, memory: NDArray[np.uint8]) -> None:
        """Let contiguous bytes, an output's, count as unwritten until a launch has written them.

        A read of what no launch has written gives poison and, with ``hazards``, is reported.
        """
        self._poisoned.add(memory)

    def __call__(self, launch: Launch) -> None:
        """Run one launch. Raises what `Machine.launch` raises; LaunchError for a kernel of another chip."""
        module, machine = self._module(launch)
        if self.chip is not None and not self.chip.runs(module.target):
            raise LaunchError(
                f"Kernel {launch.kernel} was compiled for {module.target}, and {self.chip.arch} is emulated "
                "here: compile it for that, or open a device of its own."
            )
        kernel = module.kernel(launch.kernel)
        grid = None
        spans = _spans(launch.allocations)
        tensors = [self._poisoned.register(machine.memory, span, name) for name, span in spans]
        shape = Shape(launch.grid, launch.block, launch.cluster, launch.shared_bytes)
        try:
            grid = machine.grid(kernel, shape, _packed(kernel, launch.parameters), module.globals)
            self.grids.append(grid)
            spread.run(grid, self.processes)
        finally:
            if grid is not None:
                # Findings and counts are kept; what the watch noted of every byte is not.
                grid.watch = None
            for tensor in tensors:
                self._poisoned.keep(tensor)
                machine.memory.release(tensor)

    def _module(self, launch: Launch) -> tuple[Module, Machine]:
        known = self._modules.get(launch.image)
        if known is None:
            module = parsed(launch.image, launch.ptx)
            machine = Machine(
                self.schedule,
                self.residency,
                self.limits,
                GlobalMemory(),
                self.hazards,
                self.strict,
                self.exact,
            )
            known = (module, machine)
            self._modules[launch.image] = known
        return known


_KEPT = 64
_parsed: dict[tuple[str, int], Module] = {}


def parsed(image: str, ptx: str) -> Module:
    """The module of a PTX text, parsed once in a process for each image and text."""
    key = (image, hash(ptx))
    if key not in _parsed:
        _parsed[key] = parse(ptx)
        if len(_parsed) > _KEPT:
            del _parsed[next(iter(_parsed))]
    return _parsed[key]


def _packed(kernel: Kernel, parameters: tuple[bytes, ...]) -> bytes:
    """The parameters at their offsets in the parameter space."""
    packed = bytearray(kernel.param_bytes)
    for declared, given in zip(kernel.params, parameters, strict=True):
        packed[declared.offset : declared.offset + declared.size] = given
    return bytes(packed)


def _spans(allocations: Iterable[Allocation]) -> list[tuple[str, NDArray[np.uint8]]]:
    """The memory of a launch as spans that do not overlap, named after the arguments that lie in them."""
    spans: list[tuple[int, int, list[str]]] = []
    for allocation in sorted(allocations, key=lambda a: a.base):
        if not allocation.nbytes:
            continue
        name = f"argument {allocation.argument}" if allocation.argument >= 0 else "host memory"
        end = allocation.base + allocation.nbytes
        if spans and allocation.base < spans[-1][1]:
            start, last, names = spans[-1]
            spans[-1] = (start, max(last, end), names if name in names else [*names, name])
        else:
            spans.append((allocation.base, end, [name]))
    return [(" and ".join(names), _bytes(start, end - start)) for start, end, names in spans]


def _bytes(base: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(base))
