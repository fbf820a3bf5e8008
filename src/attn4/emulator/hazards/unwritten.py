"""Registers that no one wrote: a value made of such is followed until something depends on it.

A compiler may copy and combine what is not defined, as long as nothing comes of it: a shuffle reads only the
lane that is asked for, and an operand of a sum may be missing where its result is dropped. So an undefined
value is followed through arithmetic, lane by lane, and reported where it is used: as an address, as data that
is stored, as an operand of a product, or as the condition of a branch.

What is followed is worked off for many instructions at once, where a segment ends: in the usual case, that
nothing undefined is about, one comparison answers for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.extra import Extra, Mask, report
from attn4.emulator.hazards.flow import Flow, Step, Suspects, registers_in
from attn4.emulator.ptx.module import Immediate, Negated, Operand, Register

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Lanes = NDArray[Any]


@dataclass(slots=True)
class _Undefined:
    """What is undefined in a warp: ``bits`` names the registers, ``lanes`` the lanes of each, by place."""

    bits: int
    lanes: dict[int, Mask]

    def of(self, places: Sequence[int], nothing: Mask) -> Mask:
        """The lanes in which any of the registers is undefined."""
        found = nothing
        for place in places:
            if self.bits >> place & 1:
                found = found | self.lanes[place]
        return found

    def put(self, place: int, lanes: Mask) -> None:
        """Say of a register which of its lanes are undefined."""
        if lanes.any():
            self.bits |= 1 << place
            self.lanes[place] = lanes
        elif self.bits >> place & 1:
            self.bits &= ~(1 << place)
            del self.lanes[place]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One instruction of a batch: its step, and what it needs of the values that the batch is given.

    ``guard`` is the index of the guard's value, ``values`` those of its sources where their values matter
    (selp, shfl, a product's scale-d); -1 for a source that is no register.
    """

    step: Step
    guard: int
    values: tuple[int, ...]


class Unwritten:
    """What is to be put beside the instructions of a kernel to follow what no one wrote.

    ``followed`` are the registers that may hold something undefined.
    """

    def __init__(self, flow: Flow, suspects: Suspects) -> None:
        self._flow = flow
        self._first = 0
        for bits in suspects.unwritten.values():
            self._first |= bits
        self.followed = self._closure(self._first)

    def batches(self, steps: Sequence[Step]) -> Iterator[tuple[int, Extra]]:
        """For the steps of one segment: operations, each with the number of the instruction it precedes; the
        last may follow the last instruction, and comes with the number after it.
        """
        batch: list[Step] = []
        needed = 0
        for step in steps:
            if not step.touches & self.followed:
                if step.writes & needed:
                    yield step.number, self._batch(batch)
                    batch, needed = [], 0
                continue
            own = self._needs(step)
            if step.writes & needed:
                yield step.number, self._batch(batch)
                batch, needed = [], 0
            batch.append(step)
            needed |= own
            if step.writes & own or not _passes_on(step):
                # What uses a value is looked at before it is executed: it may fail.
                yield step.number, self._batch(batch)
                batch, needed = [], 0
        if batch:
            last = steps[-1]
            yield last.number + (last.operation is not None), self._batch(batch)

    def _closure(self, bits: int) -> int:
        steps = [step for step in self._flow.steps.values() if _passes_on(step)]
        before = 0
        while bits != before:
            before = bits
            for step in steps:
                if step.reads & bits:
                    bits |= step.writes
        return bits

    def _needs(self, step: Step) -> int:
        return self._flow.bits(operand for operand in _needed(step) if isinstance(operand, Register))

    def _batch(self, steps: list[Step]) -> Extra:
        operands: list[Operand] = []
        entries = []
        for step in steps:
            indices = []
            for operand in _needed(step):
                if isinstance(operand, Register) and operand not in operands:
                    operands.append(operand)
                indices.append(operands.index(operand) if isinstance(operand, Register) else -1)
            guarded = step.instruction.guard is not None
            entries.append(_Entry(step, indices[0] if guarded else -1, tuple(indices[1 if guarded else 0 :])))
        touched = 0
        for step in steps:
            touched |= step.touches
        first = self._first

        def run(warp: Warp, mask: Mask, *values: Lanes) -> None:
            state: _Undefined | None = warp.state.get("undefined")
            if state is None:
                everywhere = np.ones(warp.lanes, np.bool_)
                lanes = dict.fromkeys(registers_in(first), everywhere)
                state = warp.state["undefined"] = _Undefined(first, lanes)
            if state.bits & touched:
                for entry in entries:
                    if state.bits & entry.step.touches:
                        self._follow(warp, mask, state, entry, values)

        return Extra(steps[-1].instruction, run, tuple(operands))

    def _follow(
        self, warp: Warp, mask: Mask, state: _Undefined, entry: _Entry, values: tuple[Lanes, ...]
    ) -> None:
        step = entry.step
        lanes = mask
        nothing = np.zeros(warp.lanes, np.bool_)
        guard = step.instruction.guard
        if guard is not None:
            passed = values[entry.guard]
            if step.operation is not None or step.instruction.opcode == "bra":
                self._judge(warp, step, state, mask & state.of([self._flow.place(guard.register)], nothing))
            lanes = mask & (~passed if guard.negated else passed)
        if step.operation is None or not lanes.any():
            return
        given = [None if at < 0 else values[at] for at in entry.values]
        if step.instruction.opcode == "shfl":
            result = self._shuffled(warp, lanes, state, step, given)
        elif step.instruction.opcode == "selp":
            result = self._selected(state, step, given[0], nothing)
        else:
            used = step.reads
            if step.accumulators and _adds(step, given, lanes):
                used |= step.accumulators
            result = state.of(registers_in(used & self.followed), nothing)
            if step.operation.effect:
                self._judge(warp, step, state, result & lanes, used)
                result = nothing
        for place in registers_in(step.writes & self.followed):
            state.put(place, np.where(lanes, result, state.lanes.get(place, nothing)))

    def _judge(self, warp: Warp, step: Step, state: _Undefined, bad: Mask, used: int | None = None) -> None:
        """Report a use in the lanes ``bad``, and forget that they are undefined: once is enough."""
        if not bad.any():
            return
        place = int(bad.argmax())
        guilty = 0
        for register in registers_in((step.reads if used is None else used) & state.bits):
            if state.lanes[register][place]:
                guilty |= 1 << register
                state.put(register, state.lanes[register] & ~bad)
        message = f"a value that no one wrote is used: {self._flow.named(guilty)}"
        report(warp, place, step.instruction, "unwritten", message)

    def _shuffled(
        self, warp: Warp, lanes: Mask, state: _Undefined, step: Step, given: list[Lanes | None]
    ) -> Mask:
        """The same shuffle, of one bit a lane: whether its value is undefined."""
        operation = step.operation
        assert operation is not None
        (source, *_), nothing = operation.sources, np.zeros(warp.lanes, np.bool_)
        bit = state.of([self._flow.place(source)] if isinstance(source, Register) else [], nothing)
        rest = [
            np.repeat(constant, warp.lanes) if constant is not None else value
            for constant, value in zip(operation.constants[1:], given[1:], strict=True)
        ]
        moved = operation.function(warp, lanes, bit.astype(np.uint32), *rest)
        values = moved[0] if isinstance(moved, (tuple, list)) else moved
        found: Mask = np.asarray(values) != 0
        return found

    def _selected(self, state: _Undefined, step: Step, chosen: Lanes | None, nothing: Mask) -> Mask:
        """What selp takes of two values."""
        first, second, condition = step.operation.sources  # type: ignore[union-attr]
        one, other, which = (state.of(self._places(x), nothing) for x in (first, second, condition))
        if chosen is None:
            return one | other | which
        taken = ~chosen if isinstance(condition, Negated) else chosen
        return np.where(taken, one, other) | which

    def _places(self, operand: Operand) -> list[int]:
        if isinstance(operand, Negated):
            operand = operand.register
        return [self._flow.place(operand)] if isinstance(operand, Register) else []


def _passes_on(step: Step) -> bool:
    """Whether what an instruction writes is undefined if what it reads is."""
    return step.operation is not None and (not step.operation.effect or step.instruction.opcode == "shfl")


def _needed(step: Step) -> list[Operand]:
    """The guard, and the operands whose values say what becomes of something undefined."""
    guard = step.instruction.guard
    needed: list[Operand] = [] if guard is None else [guard.register]
    if step.operation is None:
        return needed
    if step.instruction.opcode == "shfl":
        return [*needed, *step.operation.sources]
    if step.instruction.opcode == "selp":
        condition = step.operation.sources[2]
        return [*needed, condition.register if isinstance(condition, Negated) else condition]
    if step.accumulators:
        return [*needed, step.instruction.operands[3]]
    return needed


def _adds(step: Step, given: list[Lanes | None], lanes: Mask) -> bool:
    """Whether a product adds to D: its scale-d is true."""
    scale = step.instruction.operands[3]
    if isinstance(scale, Immediate):
        return scale.value != 0
    return given[0] is None or bool(given[0][lanes].any())
