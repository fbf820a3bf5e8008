"""What the text of a kernel says of its registers: which reads may come too early, by forward data flow.

Whether they do depends on the path that threads take, so what is found here is only suspected, and the run
time watches it (`registers`). A kernel that is right on every path has no suspects and runs unwatched.

A set of registers is an int with bit n for the register at place n of a warp's list. Paths are those of the
basic blocks, whether or not any thread can take them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from attn4.emulator.codegen.segments import read, written
from attn4.emulator.isa.registry import Operation
from attn4.emulator.ptx.module import Immediate, Instruction, Kernel, Register, Vector

State = TypeVar("State")

GROUPS = 8
"""Committed groups of products that are told apart; older ones count as one."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction and the registers that it reads and writes, its guard among those read.

    ``accumulators`` and ``fragments`` are D and the registers of A of a wgmma product: what it leaves in the
    hands of the tensor core. D is among ``writes``, not among ``reads``: `adds` says whether it is read.
    """

    number: int
    instruction: Instruction
    operation: Operation | None
    reads: int = 0
    writes: int = 0
    accumulators: int = 0
    fragments: int = 0

    @property
    def touches(self) -> int:
        """All registers that it names."""
        return self.reads | self.writes

    @property
    def kind(self) -> str:
        """Opcode and first modifier of what the analyses tell apart, as ``wgmma.fence``."""
        i = self.instruction
        return f"{i.opcode}.{i.modifiers[0]}" if i.modifiers else i.opcode

    @property
    def adds(self) -> bool:
        """Whether a product may read D: its scale-d is not the constant false."""
        scale = self.instruction.operands[3] if self.accumulators else None
        return self.accumulators != 0 and not (isinstance(scale, Immediate) and scale.value == 0)


@dataclass(slots=True)
class Suspects:
    """Registers to watch, by the number of the instruction where they are to be looked at.

    Attributes
    ----------
    pending
        Registers that a product may still own when the instruction touches them.
    unfenced
        Operands of a product that threads may have touched since the last wgmma.fence; the bit
        `Flow.first` stands for no fence at all.
    unwritten
        Registers that may be read before they were written.
    unfinished
        Instructions that end threads while products may be unfinished.
    """

    pending: dict[int, int] = field(default_factory=dict)
    unfenced: dict[int, int] = field(default_factory=dict)
    unwritten: dict[int, int] = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)


def registers_in(bits: int) -> list[int]:
    """The places in a set of registers, in order."""
    places = []
    while bits:
        lowest = bits & -bits
        places.append(lowest.bit_length() - 1)
        bits ^= lowest
    return places


class Flow:
    """The steps of a kernel by basic block. ``places`` gives the place of each register."""

    def __init__(
        self, kernel: Kernel, operations: Mapping[int, Operation], places: Mapping[Register, int]
    ) -> None:
        self._places = places
        self._names = {place: register.name for register, place in places.items()}
        self.blocks: list[list[Step]] = []
        number = 0
        for block in kernel.blocks:
            steps = []
            for instruction in block.instructions:
                steps.append(self._step(number, instruction, operations.get(number)))
                number += 1
            self.blocks.append(steps)
        self._successors = [block.successors for block in kernel.blocks]
        self.steps = {step.number: step for steps in self.blocks for step in steps}
        self.first = 1 << len(places)
        """A bit that is no register's: no wgmma.fence was executed yet."""

    def place(self, register: Register) -> int:
        """The place of a register in a warp's list."""
        return self._places[register]

    def bits(self, registers: Iterable[Register]) -> int:
        """Registers as a set."""
        bits = 0
        for register in registers:
            bits |= 1 << self._places[register]
        return bits

    def named(self, bits: int) -> str:
        """Registers by their names, the first few of many."""
        places = registers_in(bits)
        names = [self._names[place] for place in places[:4] if place in self._names]
        return ", ".join(names) + (f" and {len(places) - 4} more" if len(places) > 4 else "")

    def suspects(self) -> Suspects:
        """All that is to be watched."""
        found = Suspects()
        self._pending(found)
        self._unfenced(found)
        self._unwritten(found)
        return found

    def _step(self, number: int, i: Instruction, operation: Operation | None) -> Step:
        if operation is None:
            guard = self.bits([i.guard.register]) if i.guard else 0
            return Step(number, i, None, guard)
        reads, writes = self.bits(read(operation)), self.bits(written(operation))
        if i.opcode == "wgmma" and i.modifiers[0] == "mma_async":
            a = i.operands[1]
            fragments = (
                self.bits(r for r in a.items if isinstance(r, Register)) if isinstance(a, Vector) else 0
            )
            own = operation.sources[len(operation.destinations) :]
            reads = self.bits(r for r in own if isinstance(r, Register))
            return Step(number, i, operation, reads, writes, accumulators=writes, fragments=fragments)
        return Step(number, i, operation, reads, writes)

    def _solve(
        self,
        entry: State,
        transfer: Callable[[State, Step], State],
        join: Callable[[State, State], State],
    ) -> list[State | None]:
        """The state before each block: the least that the paths into it agree on; None: never reached."""
        before: list[State | None] = [None] * len(self.blocks)
        before[0] = entry
        todo = [0]
        while todo:
            index = todo.pop()
            state = before[index]
            assert state is not None
            for step in self.blocks[index]:
                state = transfer(state, step)
            for successor in self._successors[index]:
                known = before[successor]
                joined = state if known is None else join(known, state)
                if joined != known:
                    before[successor] = joined
                    if successor not in todo:
                        todo.append(successor)
        return before

    def _walk(
        self, before: list[State | None], transfer: Callable[[State, Step], State]
    ) -> Iterator[tuple[Step, State]]:
        """Each step that is reached, with the state before it."""
        for steps, state in zip(self.blocks, before, strict=True):
            if state is None:
                continue
            for step in steps:
                yield step, state
                state = transfer(state, step)

    def _pending(self, found: Suspects) -> None:
        transfer = _Pending(len(self._places) + 1)
        before = self._solve(transfer.entry, transfer, transfer.join)
        mixed = self._mixed_accumulators()
        for step, state in self._walk(before, transfer):
            owned = transfer.accumulators(state)
            reading = transfer.fragments(state)
            if step.accumulators:
                # Products of one shape follow each other in order (PTX 9.7.15.7.1); A is only read.
                early = step.reads & owned | step.writes & (reading | owned & mixed)
            else:
                early = step.touches & (owned | reading)
            if early:
                found.pending[step.number] = early
            if step.instruction.opcode in ("ret", "exit") and (owned or reading):
                found.unfinished.add(step.number)

    def _mixed_accumulators(self) -> int:
        """Registers that products of more than one shape or type accumulate into."""
        forms: dict[tuple[str, ...], int] = {}
        for steps in self.blocks:
            for step in steps:
                if step.accumulators:
                    form = step.instruction.modifiers
                    forms[form] = forms.get(form, 0) | step.accumulators
        mixed = seen = 0
        for bits in forms.values():
            mixed |= seen & bits
            seen |= bits
        return mixed

    def _unfenced(self, found: Suspects) -> None:
        operands = 0
        for steps in self.blocks:
            for step in steps:
                operands |= step.accumulators | step.fragments
        if not operands:
            return

        def transfer(touched: int, step: Step) -> int:
            if step.kind == "wgmma.fence" and step.instruction.guard is None:
                return 0
            return touched if step.accumulators else touched | step.touches & operands

        before = self._solve(self.first, transfer, int.__or__)
        for step, touched in self._walk(before, transfer):
            if step.accumulators and (early := touched & (step.accumulators | step.fragments | self.first)):
                found.unfenced[step.number] = early

    def _unwritten(self, found: Suspects) -> None:
        def transfer(known: int, step: Step) -> int:
            return known | step.writes if step.instruction.guard is None else known

        for step, known in self._walk(self._solve(0, transfer, int.__and__), transfer):
            needed = step.reads | (step.accumulators if step.adds else 0)
            if missing := needed & ~known:
                found.unwritten[step.number] = missing


Pending = tuple[int, tuple[int, ...]]
"""Operands of products not yet committed, and those of each committed group, the latest first: D, and A
shifted by the number of registers.
"""


class _Pending:
    """What engines may own: the transfer function, and how its states are joined and read."""

    def __init__(self, shift: int) -> None:
        self._shift = shift
        self._low = (1 << shift) - 1
        self.entry: Pending = (0, ())

    def __call__(self, state: Pending, step: Step) -> Pending:
        opened, groups = state
        i = step.instruction
        if step.accumulators:
            return opened | step.accumulators | step.fragments << self._shift, groups
        if i.guard is not None or i.opcode != "wgmma":
            return state
        if i.modifiers[0] == "commit_group":
            shifted = (opened, *groups)
            if len(shifted) > GROUPS:
                shifted = (*shifted[: GROUPS - 1], shifted[-2] | shifted[-1])
            return 0, shifted
        if i.modifiers[0] == "wait_group":
            (left,) = i.operands
            if isinstance(left, Immediate) and left.value < GROUPS:
                return opened, groups[: left.value]
        return state

    @staticmethod
    def join(one: Pending, other: Pending) -> Pending:
        long, short = sorted((one[1], other[1]), key=len, reverse=True)
        both = tuple(a | b for a, b in zip(long, short, strict=False)) + long[len(short) :]
        return one[0] | other[0], both

    def accumulators(self, state: Pending) -> int:
        """Registers of D."""
        return self._all(state) & self._low

    def fragments(self, state: Pending) -> int:
        """Registers of A."""
        return self._all(state) >> self._shift

    @staticmethod
    def _all(state: Pending) -> int:
        bits = state[0]
        for group in state[1]:
            bits |= group
        return bits
