"""A launch kept with the memory that it found, so that it can be run again, changed and in other orders."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from attn4.emulator.faults import EmulationError
from attn4.emulator.grid import Grid, Limits, Residency
from attn4.emulator.hazards.findings import Findings, Hazard
from attn4.emulator.launch.record import Launch
from attn4.emulator.runner import Runner
from attn4.emulator.schedule import Schedule

Bytes = NDArray[np.uint8]
Keys = frozenset[tuple[str, int]]
"""Kinds and PTX lines of hazards."""


@dataclass(frozen=True, slots=True)
class Replay:
    """How a launch went: what was reported, the fault that ended it (None: it ran to its end), its memory.

    ``grid`` is the one that ran, None if it did not start.
    """

    hazards: tuple[Hazard, ...]
    fault: EmulationError | None
    memory: tuple[Bytes, ...]
    grid: Grid | None

    @property
    def keys(self) -> Keys:
        """Kind and PTX line of each hazard."""
        return frozenset((hazard.kind, hazard.line) for hazard in self.hazards)

    @property
    def kinds(self) -> list[str]:
        """What was found: the kinds of the hazards and the class of the fault."""
        found = dict.fromkeys(hazard.kind for hazard in self.hazards)
        if self.fault is not None:
            found[type(self.fault).__name__] = None
        return list(found)


@dataclass(frozen=True, slots=True)
class Recording:
    """A launch, and the contents of its allocations before it; ``owners`` keep that memory alive."""

    launch: Launch
    before: tuple[Bytes, ...]
    owners: list[object] = field(default_factory=list, repr=False)

    def replay(
        self,
        schedule: Schedule,
        *,
        ptx: str | None = None,
        sms: int = 2,
        hazards: bool = True,
        beyond: Keys | None = None,
        limits: Limits | None = None,
    ) -> Replay:
        """Run the launch again over the same memory, with another text of its kernel where ``ptx`` is given.

        ``beyond``: it ends with the first hazard that is not one of these.
        What the emulator has against the kernel is a result, not an error: no EmulationError gets out.
        """
        for allocation, content in zip(self.launch.allocations, self.before, strict=True):
            allocation.bytes()[:] = content
        launch = self.launch
        if ptx is not None:
            launch = replace(launch, ptx=ptx, image=hashlib.sha256(ptx.encode()).hexdigest())
        runner = Runner(schedule, Residency(sms=sms), limits or Limits(seconds=120), hazards=hazards)
        fault: EmulationError | None = None
        try:
            with _code_kept_apart(), _ended_by_first(beyond) if beyond is not None else nullcontext():
                runner(launch)
            grid: Grid | None = runner.grids[-1]
        except EmulationError as error:
            fault, grid = error, _grid_of(error)
        found = tuple(grid.findings) if grid is not None else ()
        if isinstance(fault, _Enough):
            fault = None
        return Replay(found, fault, contents(launch), grid)


def contents(launch: Launch) -> tuple[Bytes, ...]:
    """A copy of the launch's memory, one array an allocation."""
    return tuple(allocation.bytes().copy() for allocation in launch.allocations)


@contextmanager
def recorded() -> Iterator[list[Recording]]:
    """Keep every launch that runs in this block, with its memory before it, and every tensor made in it."""
    recordings: list[Recording] = []
    tensors = _Kept()
    run = Runner.__call__

    def keep(runner: Runner, launch: Launch) -> Any:
        recordings.append(Recording(launch, contents(launch), tensors.kept))
        return run(runner, launch)

    with patch.object(Runner, "__call__", keep), tensors:
        yield recordings


class _Kept(TorchDispatchMode):
    """Keeps what torch's operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[object] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.kept.append(result)
        return result


def _grid_of(error: BaseException) -> Grid | None:
    """The grid in which an error was raised."""
    traceback = error.__traceback__
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, Grid):
                return value
        traceback = traceback.tb_next
    return None


class _Enough(EmulationError):
    """A hazard was found, and no more are asked for."""


@contextmanager
def _ended_by_first(known: Keys) -> Iterator[None]:
    add = Findings.add

    def end(findings: Findings, hazard: Hazard, **place: Any) -> None:
        if (hazard.kind, hazard.line) not in known:
            add(findings, hazard, **place)
            raise _Enough(str(hazard))

    with patch.object(Findings, "add", end):
        yield


@contextmanager
def _code_kept_apart() -> Iterator[None]:
    """Generated code of changed kernels does not fill the user's cache."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        yield
