"""Products that follow each other into the same accumulators, found so that they are issued together.

Only the last of a chain is read, so the others need no registers of their own. Issuing a product later is
something that the hardware may do as well: it runs asynchronously until it is waited for.
"""

from __future__ import annotations

from attn4.emulator.codegen.segments import Segment, read, written
from attn4.emulator.isa.registry import Operation
from attn4.emulator.ptx.module import Immediate, Register, Vector


def chains(segment: Segment) -> dict[int, tuple[int, ...]]:
    """The instruction numbers of each chain of two or more, in order, by the number of the last."""
    found: dict[int, tuple[int, ...]] = {}
    members: list[int] = []
    first: Operation | None = None
    accumulators: frozenset[Register] = frozenset()
    for number, operation in segment.operations:
        if _is_product(operation):
            if first is None or not _continues(first, operation):
                _close(found, members)
                first = operation
                accumulators = frozenset(written(operation))
            members.append(number)
        elif first is not None and (operation.effect or _touches(operation, accumulators)):
            _close(found, members)
            first = None
    _close(found, members)
    return found


def _close(found: dict[int, tuple[int, ...]], members: list[int]) -> None:
    if len(members) > 1:
        found[members[-1]] = tuple(members)
    members.clear()


def _is_product(operation: Operation) -> bool:
    i = operation.instruction
    return i.opcode == "wgmma" and i.modifiers[0] == "mma_async" and i.guard is None


def _continues(first: Operation, operation: Operation) -> bool:
    """Whether both are of one form: the same accumulators, types and flags, A from the same kind of place."""
    a, b = first.instruction, operation.instruction
    own = set(operation.sources[len(operation.destinations) :])
    return (
        a.modifiers == b.modifiers
        and a.operands[0] == b.operands[0]
        and isinstance(a.operands[1], Vector) == isinstance(b.operands[1], Vector)
        and all(isinstance(flag, Immediate) for flag in b.operands[4:])
        and a.operands[4:] == b.operands[4:]
        and not own.intersection(written(first))
    )


def _touches(operation: Operation, accumulators: frozenset[Register]) -> bool:
    return any(r in accumulators for r in read(operation)) or any(
        r in accumulators for r in written(operation)
    )
