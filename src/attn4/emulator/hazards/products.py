"""Registers of wgmma products: in flight until their group was waited for, and in need of a fence before.

Everything here is per hardware warp, since the instructions are ``.aligned``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from attn4.emulator.hazards.extra import Check, Extra, Mask, described, report, where_guarded
from attn4.emulator.hazards.flow import Flow, Step, Suspects, registers_in
from attn4.emulator.isa.control import uniform
from attn4.emulator.ptx.module import Immediate, Instruction

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp


@dataclass(slots=True)
class _Held:
    """Products of one hardware warp: those issued since the last commit, and each committed group.

    ``touched`` gives the instruction that touched an operand last since the last wgmma.fence, by place.
    """

    opened: list[Step] = field(default_factory=list)
    groups: list[list[Step]] = field(default_factory=list)
    touched: dict[int, Instruction] = field(default_factory=dict)
    fenced: bool = False

    def in_flight(self) -> Iterator[Step]:
        """All that no wait covered yet."""
        for group in (*self.groups, self.opened):
            yield from group


class Products:
    """What is to be put beside the instructions of a kernel to watch the registers of its products."""

    def __init__(self, flow: Flow, suspects: Suspects) -> None:
        self._flow = flow
        self._early = suspects.pending
        self._unfinished = suspects.unfinished
        self._unfenced = suspects.unfenced
        self._operands = 0
        for bits in suspects.unfenced.values():
            self._operands |= bits
        self._follow = bool(suspects.pending or suspects.unfinished)

    def before(self, step: Step) -> Iterator[Extra]:
        """What is put in front of an instruction."""
        i = step.instruction
        if early := self._early.get(step.number):
            yield where_guarded(i, self._check(step, early))
        if step.number in self._unfinished:
            yield where_guarded(i, self._leak(i))
        if unfenced := self._unfenced.get(step.number):
            yield where_guarded(i, self._fence_needed(step, unfenced))

    def after(self, step: Step) -> Iterator[Extra]:
        """What is put behind an instruction."""
        i = step.instruction
        if self._follow:
            if step.accumulators:
                yield where_guarded(i, _each(lambda held: held.opened.append(step)))
            elif step.kind == "wgmma.commit_group":
                yield where_guarded(i, _each(_commit))
            elif step.kind == "wgmma.wait_group":
                yield _wait(i)
        if self._unfenced:
            touched = registers_in(step.touches & self._operands)
            if step.kind == "wgmma.fence":
                yield where_guarded(i, _each(_fence))
            elif touched and not step.accumulators:
                yield where_guarded(i, _each(lambda held: held.touched.update(dict.fromkeys(touched, i))))

    def _check(self, step: Step, early: int) -> Check:
        def run(warp: Warp, mask: Mask) -> None:
            for place, held in _held(warp, mask):
                hits = ((product, _collision(step, product) & early) for product in held.in_flight())
                product, hit = next(((p, bits) for p, bits in hits if bits), (None, 0))
                if product is not None:
                    i = product.instruction
                    message = (
                        f"what a product in flight may use is touched, {self._flow.named(hit)}: no "
                        f"wgmma.wait_group covers {described(i)}"
                    )
                    report(warp, place, step.instruction, "pending register", message, i)

        return run

    def _leak(self, i: Instruction) -> Check:
        def run(warp: Warp, mask: Mask) -> None:
            for place, held in _held(warp, mask):
                product = next(held.in_flight(), None)
                if product is not None:
                    other = product.instruction
                    message = f"threads exit, and no wgmma.wait_group covers {described(other)}"
                    report(warp, place, i, "leak", message, other)

        return run

    def _fence_needed(self, step: Step, unfenced: int) -> Check:
        places = registers_in(unfenced)

        def run(warp: Warp, mask: Mask) -> None:
            for place, held in _held(warp, mask):
                touched = next((register for register in places if register in held.touched), None)
                if touched is not None:
                    other = held.touched[touched]
                    message = (
                        f"{self._flow.named(1 << touched)} is an operand of a product, and no wgmma.fence "
                        f"stands between it and {described(other)}, which touched it"
                    )
                    report(warp, place, step.instruction, "unfenced", message, other)
                elif not held.fenced:
                    message = "a product without any wgmma.fence before it"
                    report(warp, place, step.instruction, "unfenced", message)

        return run


def _collision(step: Step, product: Step) -> int:
    """Registers that an instruction may not touch while a product is in flight.

    Products of one form may follow each other into the same accumulators, and share registers of A.
    """
    if not step.accumulators:
        return step.touches & (product.accumulators | product.fragments)
    same = step.instruction.modifiers == product.instruction.modifiers
    return step.reads & product.accumulators | step.writes & (
        product.fragments | (0 if same else product.accumulators)
    )


def _held(warp: Warp, mask: Mask) -> Iterator[tuple[int, _Held]]:
    """The hardware warps with an active lane: the place of the first such lane, and what is known of each."""
    known: dict[int, _Held] = warp.state.setdefault("watched products", {})
    for position, row in enumerate(mask.reshape(-1, 32)):
        if row.any():
            yield position * 32 + int(row.argmax()), known.setdefault(position, _Held())


def _each(change: Callable[[_Held], None]) -> Check:
    def run(warp: Warp, mask: Mask) -> None:
        for _, held in _held(warp, mask):
            change(held)

    return run


def _commit(held: _Held) -> None:
    held.groups.append(held.opened)
    held.opened = []


def _fence(held: _Held) -> None:
    held.touched.clear()
    held.fenced = True


def _wait(i: Instruction) -> Extra:
    (left,) = i.operands

    def run(warp: Warp, mask: Mask, pending: int) -> None:
        for _, held in _held(warp, mask):
            del held.groups[: max(len(held.groups) - pending, 0)]

    if isinstance(left, Immediate):
        count = left.value
        return where_guarded(i, lambda warp, mask: run(warp, mask, count))
    return Extra(i, lambda warp, mask, pending: run(warp, mask, uniform(np.asarray(pending), mask)), (left,))
