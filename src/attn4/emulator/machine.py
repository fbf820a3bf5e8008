"""The virtual GPU: global memory, and launches one after another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.codegen.program import program
from attn4.emulator.faults import EmulationError
from attn4.emulator.grid import Grid, Limits, Residency, Shape
from attn4.emulator.isa.memory import PARAMETER_BASE
from attn4.emulator.ptx.module import Kernel, Variable
from attn4.emulator.schedule import RoundRobin, Schedule
from attn4.emulator.state.memory import ByteMemory, GlobalMemory


@dataclass(slots=True)
class Machine:
    """A GPU that runs one launch at a time.

    ``memory`` holds the allocations that kernels may touch (``memory.register``); module variables join it
    when the kernel that comes with them is launched first, and keep their contents. ``hazards``: look for
    them; what was found is in the Grid of each launch. ``strict``: of tcgen05, too, as `Watch` says.
    ``exact``: products of warpgroups are summed bit for bit as on an H200, which takes two to three times as
    long.
    """

    schedule: Schedule = field(default_factory=RoundRobin)
    residency: Residency = field(default_factory=Residency)
    limits: Limits = field(default_factory=Limits)
    memory: GlobalMemory = field(default_factory=GlobalMemory)
    hazards: bool = False
    strict: bool = False
    exact: bool = False
    _variables: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    def launch(
        self, kernel: Kernel, shape: Shape, parameters: bytes, variables: Iterable[Variable] = ()
    ) -> Grid:
        """Run a kernel to its end; the Grid returned holds the counts.

        ``parameters`` are the bytes of all parameters at their offsets, ``variables`` those of the module.
        Raises EmulationError if the kernel or its launch is wrong, MemoryFault for an access out of bounds
        or misaligned, UnsupportedInstruction for what is not emulated; each says where.
        """
        grid = self.grid(kernel, shape, parameters, variables)
        grid.run()
        return grid

    def grid(
        self, kernel: Kernel, shape: Shape, parameters: bytes, variables: Iterable[Variable] = ()
    ) -> Grid:
        """A launch that is still to ``run``; arguments and errors are those of `launch`."""
        _check(kernel, shape, parameters)
        data = np.zeros(max(16, len(parameters)), dtype=np.uint8)
        data[: len(parameters)] = np.frombuffer(parameters, dtype=np.uint8)
        symbols = {param.name: PARAMETER_BASE + param.offset for param in kernel.params}
        for variable in variables:
            symbols[variable.name] = self._address(variable)
        return Grid(
            program(kernel, hazards=self.hazards),
            shape,
            self.memory,
            symbols,
            ByteMemory("kernel parameters", data, PARAMETER_BASE, tracked=False),
            self.schedule,
            self.residency,
            self.limits,
            self.hazards,
            self.strict,
            self.exact,
        )

    def _address(self, variable: Variable) -> int:
        """Where a module variable lies; allocated when it is first asked for, zero but for its initial
        bytes.
        """
        known = self._variables.get(id(variable))
        if known is None:
            align = max(variable.align, 16)
            room = np.zeros(variable.size + align, dtype=np.uint8)
            start = -room.ctypes.data % align
            known = room[start : start + max(variable.size, 1)]
            initial = np.frombuffer(variable.initial or b"", dtype=np.uint8)
            known[: initial.size] = initial
            self.memory.register(known, name=variable.name)
            self._variables[id(variable)] = known
        return int(known.ctypes.data)


def _check(kernel: Kernel, shape: Shape, parameters: bytes) -> None:
    if len(parameters) < kernel.param_bytes:
        raise EmulationError(
            f"{len(parameters)} bytes of parameters; {kernel.name} takes {kernel.param_bytes}"
        )
    for name, sizes in (("grid", shape.grid), ("block", shape.block), ("cluster", shape.cluster)):
        if any(size < 1 for size in sizes):
            raise EmulationError(f"{name} {sizes}: every dimension must be at least 1")
    if any(n % c for n, c in zip(shape.grid, shape.cluster, strict=True)):
        raise EmulationError(f"grid {shape.grid} is no multiple of cluster {shape.cluster}")
    threads = shape.block[0] * shape.block[1] * shape.block[2]
    if threads > 1024:
        raise EmulationError(f"block {shape.block} has {threads} threads, the limit is 1024")
    required = kernel.launch.reqntid
    if required is not None and tuple(shape.block) != tuple(required):
        raise EmulationError(f"block {shape.block}; {kernel.name} demands {required} (.reqntid)")
