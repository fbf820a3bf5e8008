"""A kernel cut into segments: runs of instructions that execute without waiting, each of which becomes a
function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attn4.emulator.isa.registry import CARRY, Operation, UnsupportedInstruction, bind, flatten
from attn4.emulator.ptx.module import (
    Instruction,
    Kernel,
    Label,
    Negated,
    Register,
    SpecialRegister,
)

NOWHERE = -1
"""The join of a branch whose paths do not meet again, and the successor of a segment that ends its
threads.
"""

JUMPS = ("bra", "ret", "exit")

_WAITING_NAMES = ("bar", "barrier", "nanosleep", "griddepcontrol", "setmaxnreg")


@dataclass(frozen=True, slots=True)
class Segment:
    """Instructions of one basic block; control leaves only after the last.

    ``operations`` pairs each instruction's number in the kernel with its binding. ``jump`` is the branch or
    exit that ends the segment, None where it falls through. ``target`` and ``following`` are segment
    indices (a branch taken; what stands next), ``join`` where the two meet again; `NOWHERE` if they do not.
    """

    index: int
    operations: tuple[tuple[int, Operation], ...]
    jump: Instruction | None
    target: int
    following: int
    join: int

    @property
    def size(self) -> int:
        """Instructions, the jump included."""
        return len(self.operations) + (self.jump is not None)


def may_wait(i: Instruction) -> bool:
    """Whether the definition of an instruction may return BLOCKED: such an instruction starts a segment."""
    return (
        i.opcode in _WAITING_NAMES
        or (i.opcode == "mbarrier" and i.modifiers[0] == "try_wait")
        or (i.opcode == "tcgen05" and i.modifiers[0] == "alloc")
        or "wait_group" in i.modifiers
        or "wait" in i.modifiers
    )


def cut(kernel: Kernel) -> tuple[Segment, ...]:
    """The segments of a kernel, those of a basic block next to each other, in the order of the text."""
    pieces = [list(_pieces(block.instructions)) for block in kernel.blocks]
    starts: list[int] = []
    total = 0
    for parts in pieces:
        starts.append(total)
        total += len(parts)
    segments: list[Segment] = []
    number = 0
    for block, parts in zip(kernel.blocks, pieces, strict=True):
        meets = NOWHERE if block.post_dominator is None else starts[block.post_dominator]
        for position, part in enumerate(parts):
            index = len(segments)
            jump = part[-1] if part and part[-1].opcode in JUMPS else None
            body = part[:-1] if jump else part
            operations = []
            for instruction in body:
                operations.append((number, _bound(instruction)))
                number += 1
            number += jump is not None
            last = position == len(parts) - 1
            following = index + 1 if index + 1 < total else NOWHERE
            target = _target(kernel, jump, starts) if jump else NOWHERE
            join = meets if last else following
            segments.append(Segment(index, tuple(operations), jump, target, following, join))
    return tuple(segments)


def _bound(instruction: Instruction) -> Operation:
    """A binding; wgmma, which adds to its destinations, reads them before its other sources."""
    operation = bind(instruction)
    if instruction.opcode != "wgmma" or not operation.destinations:
        return operation
    count = len(operation.destinations)
    return replace(
        operation,
        sources=operation.destinations + operation.sources,
        constants=(None,) * count + operation.constants,
    )


def _pieces(instructions: tuple[Instruction, ...]) -> Iterator[list[Instruction]]:
    piece: list[Instruction] = []
    for i in instructions:
        if may_wait(i) and piece:
            yield piece
            piece = []
        piece.append(i)
        if i.opcode in JUMPS:
            yield piece
            piece = []
    if piece or not instructions:
        yield piece


def _target(kernel: Kernel, jump: Instruction, starts: list[int]) -> int:
    if jump.opcode != "bra":
        return NOWHERE
    (label,) = jump.operands
    if not isinstance(label, Label):
        raise UnsupportedInstruction(jump, f"a branch to {label.text}")
    return starts[kernel.labels[label.name]]


def written(operation: Operation) -> Iterator[Register]:
    """Registers that an operation writes."""
    for operand in operation.destinations:
        if isinstance(operand, Register):
            yield operand


def read(operation: Operation) -> Iterator[Register]:
    """Registers that an operation reads, its guard included."""
    if operation.instruction.guard:
        yield operation.instruction.guard.register
    for operand in operation.sources:
        if isinstance(operand, Register):
            yield operand
        elif isinstance(operand, Negated):
            yield operand.register


def numbered(kernel: Kernel) -> dict[Register, int]:
    """The place of each register in a warp's list; the carry flag comes last."""
    places = {register: n for n, register in enumerate(kernel.registers)}
    places.setdefault(CARRY, len(places))
    return places


def local_registers(segments: tuple[Segment, ...]) -> frozenset[Register]:
    """Registers written without a guard before they are read, all within one segment: they need no
    storage.
    """
    homes: dict[Register, int] = {}
    shared: set[Register] = set()
    for segment in segments:
        defined: set[Register] = set()

        def touch(register: Register, home: int = segment.index, seen: set[Register] = defined) -> None:
            if homes.setdefault(register, home) != home or register not in seen:
                shared.add(register)

        for _, operation in segment.operations:
            for register in read(operation):
                touch(register)
            for register in written(operation):
                if operation.instruction.guard is None:
                    defined.add(register)
                touch(register)
        if segment.jump is not None and segment.jump.guard:
            touch(segment.jump.guard.register)
    return frozenset(homes.keys() - shared)


def special_registers(segments: tuple[Segment, ...]) -> frozenset[str]:
    """Names of the special registers that a kernel reads."""
    return frozenset(
        operand.name
        for segment in segments
        for _, operation in segment.operations
        for operand in flatten(operation.instruction.operands)
        if isinstance(operand, SpecialRegister)
    )
