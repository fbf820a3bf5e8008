"""Registers that are touched too early: those of products in flight, those no fence covers, those unwritten.

`watched` puts operations of its own between those of a kernel, where `flow` suspects something, and nowhere
else.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from attn4.emulator.codegen.segments import Segment, numbered
from attn4.emulator.hazards.extra import Extra
from attn4.emulator.hazards.flow import Flow
from attn4.emulator.hazards.products import Products
from attn4.emulator.hazards.unwritten import Unwritten
from attn4.emulator.isa.registry import Operation
from attn4.emulator.ptx.module import Instruction, Kernel


@dataclass(frozen=True, slots=True)
class Watched:
    """Segments with operations put in, and the instructions by the numbers of all operations: those put in
    have numbers behind the kernel's own, and count as the instruction that they stand beside.
    """

    segments: tuple[Segment, ...]
    instructions: tuple[Instruction, ...]


def watched(kernel: Kernel, segments: tuple[Segment, ...]) -> Watched:
    """The segments of a kernel with all that has to be looked at in its registers while it runs."""
    operations = {number: operation for segment in segments for number, operation in segment.operations}
    flow = Flow(kernel, operations, numbered(kernel))
    suspects = flow.suspects()
    products, unwritten = Products(flow, suspects), Unwritten(flow, suspects)
    before: dict[int, list[Extra]] = defaultdict(list)
    after: dict[int, list[Extra]] = defaultdict(list)
    start = 0
    for segment in segments:
        steps = [flow.steps[number] for number in range(start, start + segment.size)]
        start += segment.size
        for step in steps:
            before[step.number] += products.before(step)
            after[step.number] += products.after(step)
        for number, extra in unwritten.batches(steps):
            if number == start:
                after[number - 1].append(extra)
            else:
                before[number].append(extra)
    return _put_in(kernel, segments, before, after)


def _put_in(
    kernel: Kernel,
    segments: tuple[Segment, ...],
    before: dict[int, list[Extra]],
    after: dict[int, list[Extra]],
) -> Watched:
    instructions = list(kernel.instructions)
    done = []
    start = 0
    for segment in segments:
        found: list[tuple[int, Operation]] = []

        def add(extras: list[Extra], into: list[tuple[int, Operation]] = found) -> None:
            for extra in extras:
                into.append((len(instructions), extra.operation()))
                instructions.append(extra.beside)

        for number, operation in segment.operations:
            add(before[number])
            found.append((number, operation))
            add(after[number])
        if segment.jump is not None:
            add(before[start + len(segment.operations)])
        start += segment.size
        done.append(replace(segment, operations=tuple(found)))
    return Watched(tuple(done), tuple(instructions))
