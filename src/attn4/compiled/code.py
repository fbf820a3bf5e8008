"""A kernel's machine code in figures: registers, spills, and what each role's loop over keys issues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attn4.compiled.classes import count
from attn4.compiled.flow import Flow, Loop, flow
from attn4.compiled.listing import Instruction, Listing
from attn4.compiled.roles import inner_loops, regions

LONG = 32
"""Instructions. What is shorter may be one lane's work: the others jump over it, and their warp waits."""

BEGINNING = "the rest"
"""What belongs to no role: set-up, and the end of the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCode:
    """One loop, once through it, with every barrier found open.

    ``begin`` and ``end`` are addresses, ``slots`` the instructions that a warp issues, all branches inside
    the loop taken to be fallen through; ``counts`` has them by class (see ``classes``). ``least`` is without
    what a branch may jump over, if that is long (``LONG``): a mask that only some steps need.
    """

    begin: int
    end: int
    slots: int
    counts: dict[str, int]
    least: dict[str, int]

    @property
    def least_slots(self) -> int:
        """Issue slots of a step that jumps over all that it can."""
        return sum(self.least.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCode:
    """The code of one role.

    ``registers`` is what its ``setmaxnreg`` asks for, None if it has none. ``named`` is one more than the
    highest register that its code names. ``stack`` counts its loads and stores of the stack. ``loops`` are
    its innermost loops, those of masked key blocks among them.
    """

    name: str
    instructions: int
    registers: int | None
    named: int
    stack: int
    loops: tuple[LoopCode, ...] = ()

    @property
    def steady(self) -> LoopCode | None:
        """The loop with the fewest instructions: that of key blocks which need no mask."""
        return min(self.loops, key=lambda loop: loop.slots, default=None)


def role_codes(listing: Listing) -> tuple[RoleCode, ...]:
    """The roles of a kernel in order of address, and last what belongs to none."""
    graph = flow(listing)
    found = regions(graph)
    codes = [
        _role(graph, name, blocks) for name, blocks in sorted(found.items(), key=lambda item: min(item[1]))
    ]
    rest = frozenset(range(len(graph.blocks))) - frozenset().union(*found.values())
    return (*codes, _code(graph, BEGINNING, rest, None, ()))


def _role(graph: Flow, name: str, blocks: frozenset[int]) -> RoleCode:
    loops = inner_loops(graph, name, blocks)
    return _code(graph, name, blocks, _registers(graph, blocks), loops)


def _code(
    graph: Flow, name: str, blocks: frozenset[int], registers: int | None, loops: Iterable[Loop]
) -> RoleCode:
    code = graph.code(blocks)
    return RoleCode(
        name=name,
        instructions=len(code),
        registers=registers,
        named=1 + max((number for i in code for number in i.registers), default=-1),
        stack=sum(i.name in ("LDL", "STL") for i in code),
        loops=tuple(_loop(graph, loop) for loop in loops),
    )


def _loop(graph: Flow, loop: Loop) -> LoopCode:
    code = graph.code(graph.trip(loop))
    least = graph.code(_shortest(graph, sorted(graph.trip(loop))))
    return LoopCode(
        begin=code[0].address, end=code[-1].address, slots=len(code), counts=count(code), least=count(least)
    )


def _shortest(graph: Flow, trip: list[int]) -> Iterator[int]:
    """The blocks of ``trip``, in order of address, without those between a long jump and its target."""
    reached = 0
    for block in trip:
        here = graph.blocks[block]
        if here.first < reached:
            continue
        yield block
        targets = [graph.blocks[n].first for n in here.successors if n in trip]
        reached = max((first for first in targets if first - here.last >= LONG), default=reached)


def _registers(graph: Flow, blocks: frozenset[int]) -> int | None:
    """The last ``setmaxnreg`` on the way to a role: in its code, above it, or else before it."""
    asked = [(n, i) for n in range(len(graph.blocks)) for i in graph.code([n]) if i.name == "USETMAXREG"]
    above = set(graph.above(min(blocks)))
    best = (
        [i for n, i in asked if n in blocks]
        or [i for n, i in asked if n in above]
        or [i for n, i in asked if n < min(blocks)]
    )
    return _immediate(best[-1]) if best else None


def _immediate(instruction: Instruction) -> int:
    return int(instruction.operands.rpartition(",")[2], 16)
