"""Segments divided into runs of instructions that only compute, and the others between them.

A run becomes one vector function. It stands as late as it can, before the first of the other instructions
that needs something of it, so that runs are few and long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from attn4.emulator.codegen.segments import Segment, read, written
from attn4.emulator.isa.registry import Operation
from attn4.emulator.ptx.module import Register
from attn4.emulator.vector.registry import known

Numbered = tuple[int, Operation]


@dataclass(slots=True)
class Run:
    """Operations that a vector function executes, in order."""

    name: str
    operations: list[Numbered] = field(default_factory=list)
    written: dict[Register, None] = field(default_factory=dict)
    touched: dict[Register, None] = field(default_factory=dict)

    def add(self, number: int, operation: Operation) -> None:
        """Append an operation."""
        self.operations.append((number, operation))
        self.written |= dict.fromkeys(written(operation))
        self.touched |= dict.fromkeys((*written(operation), *read(operation)))

    def hinders(self, operation: Operation) -> bool:
        """Whether an operation after it needs it to have been executed."""
        reads, writes = read(operation), written(operation)
        return not (self.written.keys().isdisjoint(reads) and self.touched.keys().isdisjoint(writes))


Item = Run | Numbered


def divide(segment: Segment) -> tuple[Item, ...]:
    """The runs and the other operations of a segment, in an order of execution."""
    return tuple(_items(segment))


def _items(segment: Segment) -> Iterator[Item]:
    count = 0
    run = Run(f"run{segment.index}_0")
    for number, operation in segment.operations:
        if known(operation):
            run.add(number, operation)
            continue
        if run.operations and run.hinders(operation):
            yield run
            count += 1
            run = Run(f"run{segment.index}_{count}")
        yield number, operation
    if run.operations:
        yield run


def stored(segments: tuple[Segment, ...], items: tuple[tuple[Item, ...], ...]) -> dict[Register, None]:
    """Registers that need storage: all but those that one run alone touches, and writes before it reads."""
    homes: dict[Register, str] = {}
    outlive: dict[Register, None] = {}
    for segment, parts in zip(segments, items, strict=True):
        for item in parts:
            if isinstance(item, Run):
                _within(item, homes, outlive)
            else:
                outlive |= dict.fromkeys((*read(item[1]), *written(item[1])))
        if segment.jump is not None and segment.jump.guard:
            outlive[segment.jump.guard.register] = None
    return outlive


def _within(run: Run, homes: dict[Register, str], outlive: dict[Register, None]) -> None:
    defined: set[Register] = set()
    for _, operation in run.operations:
        for register in read(operation):
            if register not in defined:
                outlive[register] = None
        for register in written(operation):
            if operation.instruction.guard is None:
                defined.add(register)
            elif register not in defined:
                outlive[register] = None
    for register in run.touched:
        if homes.setdefault(register, run.name) != run.name:
            outlive[register] = None
