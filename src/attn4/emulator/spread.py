"""A launch spread over processes: each runs a share of the clusters on a copy of memory, and what they wrote
is put together.

That is the same as running them in one process if no CTA reads what another has written. So a kernel that
could tell is not spread (`talks`), and where two processes wrote different values to one byte, or one of them
failed, the launch is run again in one: memory is as it was until all have ended well.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.ptx.module import Instruction
from attn4.emulator.report.tally import Tally

if TYPE_CHECKING:
    from attn4.emulator.codegen.program import Program
    from attn4.emulator.grid import Grid
    from attn4.emulator.state.memory import ByteMemory

Bytes = NDArray[np.uint8]
_ORDERED = ("acquire", "release", "acq_rel", "relaxed", "volatile", "mmio")
_ONE_CTA = ("shared", "local", "param", "const")


@dataclass(frozen=True, slots=True)
class Change:
    """What a process wrote to one allocation: the bytes that differ, as packed bits, and their values."""

    where: Bytes
    values: Bytes

    @classmethod
    def between(cls, before: Bytes, after: Bytes) -> Change:
        """From copies of an allocation."""
        differs = before != after
        return cls(np.packbits(differs), after[differs])

    def mask(self, nbytes: int) -> NDArray[np.bool_]:
        """One entry a byte."""
        return np.unpackbits(self.where, count=nbytes).view(np.bool_)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a process did: changes of each allocation, and its counts."""

    changes: list[Change]
    tally: Tally
    clock: int
    retired: int


def talks(program: Program) -> Instruction | None:
    """The first instruction through which CTAs may talk in global memory, None if there is none."""
    for segment in program.segments:
        for _, operation in segment.operations:
            if _talks(operation.instruction):
                return operation.instruction
    return None


def _talks(i: Instruction) -> bool:
    spaces = {modifier.partition("::")[0] for modifier in i.modifiers}
    private = bool(spaces.intersection(_ONE_CTA))
    if i.opcode in ("atom", "red"):
        return not private
    if i.opcode in ("ld", "st"):
        return not private and bool(spaces.intersection(_ORDERED))
    if i.opcode == "cp":
        return "reduce" in i.modifiers and "global" in spaces
    return i.opcode in ("clusterlaunchcontrol", "multimem")


def run(grid: Grid, processes: int) -> None:
    """Run a launch that has not begun, in as many processes if its program does not talk. Raises what
    ``Grid.run`` raises.
    """
    if processes < 2 or grid.hazards or talks(grid.program) is not None:
        grid.run()
        return
    allocations = list(grid.memory)
    outcomes = _outcomes(grid, allocations, processes)
    if not _merge(grid, allocations, outcomes):
        grid.run()


def _outcomes(grid: Grid, allocations: Sequence[ByteMemory], processes: int) -> list[Outcome | None]:
    readers = []
    for share in range(processes):
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # From 3.12 on Python warns that locks of other threads are copied as they are; none is taken.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os.close(reader)
            _work(grid, allocations, slice(share, None, processes), writer)
        os.close(writer)
        readers.append((child, reader))
    outcomes = []
    for child, reader in readers:
        with os.fdopen(reader, "rb") as file:
            answer = file.read()
        _, status = os.waitpid(child, 0)
        outcomes.append(pickle.loads(answer) if answer and status == 0 else None)
    return outcomes


def _work(grid: Grid, allocations: Sequence[ByteMemory], share: slice, writer: int) -> None:
    """Run a share of the clusters and write the outcome; ends the process."""
    status = 1
    try:
        before = [allocation.bytes.copy() for allocation in allocations]
        grid.waiting = islice(grid.waiting, share.start, None, share.step)
        grid.run()
        changes = [Change.between(b, a.bytes) for b, a in zip(before, allocations, strict=True)]
        outcome = Outcome(changes, grid.tally, grid.clock, grid.retired)
        with os.fdopen(writer, "wb") as file:
            pickle.dump(outcome, file, protocol=pickle.HIGHEST_PROTOCOL)
        status = 0
    finally:
        os._exit(status)


def _merge(grid: Grid, allocations: Sequence[ByteMemory], outcomes: Sequence[Outcome | None]) -> bool:
    """Take over what all have done; false, with nothing taken over, if one failed or two disagree."""
    finished = [outcome for outcome in outcomes if outcome is not None]
    if len(finished) < len(outcomes):
        return False
    merged = []
    for n, allocation in enumerate(allocations):
        data, known = allocation.bytes.copy(), np.zeros(allocation.bytes.size, dtype=np.bool_)
        for outcome in finished:
            mask = outcome.changes[n].mask(data.size)
            new = data.copy()
            new[mask] = outcome.changes[n].values
            if (new != data)[known].any():
                return False
            data, known = new, known | mask
        merged.append((allocation, known, data))
    for allocation, known, data in merged:
        allocation.bytes[known] = data[known]
        if allocation.written is not None:
            allocation.written[known] = True
    for outcome in finished:
        grid.tally.merge(outcome.tally)
        grid.clock += outcome.clock
        grid.retired += outcome.retired
    grid.waiting = iter(())
    return True
