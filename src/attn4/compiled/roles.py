"""Whose code is whose: roles are told apart by what only they do.

Roles go by the names that they have in forward kernels. A role's code is what is reached only through its
first block. That block is found from the role's marks (the exponentials of softmax, the copies of load): the
highest one above them that is above no other role's marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attn4.compiled.flow import Flow, Loop
from attn4.compiled.listing import Instruction

SOFTMAX, CORRECTION, ATTEND, STORE = "softmax", "correction", "attend", "store"

MARKS: tuple[tuple[str, str], ...] = (
    (SOFTMAX, r"MUFU\.EX2"),
    ("mma", r"UTC\w*MMA"),
    ("load", r"UTMALDG|UBLKCP\.S"),
    (STORE, r"UTMASTG|UTMAREDG|UBLKRED"),
    ("schedule", r"ATOMG"),
    (CORRECTION, r"LDTM|STTM"),
)
"""Role -> what marks it, in order of rank: a role that loads from tensor memory and takes exponentials is
softmax, and attends if it multiplies, too (Hopper).
"""

_LEAST_EXPONENTIALS = 8
"""In a block of softmax; a factor or two are taken elsewhere, too."""

_MARKS = tuple((role, re.compile(pattern)) for role, pattern in MARKS)


def regions(graph: Flow) -> dict[str, frozenset[int]]:
    """The blocks of each role that is found; blocks of none are the kernel's beginning and end."""
    marked = _marked(graph)
    found: dict[str, frozenset[int]] = {}
    for role in dict.fromkeys(marked.values()):
        mine = {n for n, owner in marked.items() if owner == role}
        others = marked.keys() - mine
        blocks: set[int] = set()
        for n in mine:
            tops = [top for top in graph.above(n) if not others & graph.dominated(top)]
            blocks |= graph.dominated(tops[-1]) if tops else {n}
        attends = role == SOFTMAX and any(i.name == "HGMMA" for i in graph.code(blocks))
        found[ATTEND if attends else role] = frozenset(blocks)
    return found


def _marked(graph: Flow) -> dict[int, str]:
    """Block -> the role that its instructions mark."""
    found: dict[int, str] = {}
    numbers = range(len(graph.blocks))
    registers = {n for n in numbers if _count(graph, n, r"USETMAXREG")}
    exponentials = {n for n in numbers if _count(graph, n, r"MUFU\.EX2") >= _LEAST_EXPONENTIALS}

    def scope(n: int) -> int | None:
        return next((top for top in graph.above(n) if top in registers), None)

    softened = {scope(n) for n in exponentials} - {None}
    for n in numbers:
        if graph.parents[n] is None:
            continue
        names = {i.opcode for i in graph.code([n])}
        role = next((r for r, p in _MARKS if any(p.match(name) for name in names)), None)
        if role in (SOFTMAX, CORRECTION):
            soft = scope(n) in softened or n in exponentials
            role = SOFTMAX if soft else CORRECTION if role == CORRECTION else None
        if role is not None:
            found[n] = role
    # Who reads tensor memory and sends bulk copies itself is one role: the gradient's reduction.
    reading = {scope(n) for n, role in found.items() if role == CORRECTION} - {None}
    sends = [n for n, role in found.items() if role == STORE and scope(n) in reading]
    return found | dict.fromkeys(sends, CORRECTION)


def inner_loops(graph: Flow, role: str, blocks: Iterable[int]) -> list[Loop]:
    """The innermost loops of a role that do what marks it, in order of address."""
    around = {loop.header: loop for n in blocks if (loop := graph.innermost(n)) is not None}
    marked = [loop for loop in around.values() if _works(role, graph.code(graph.trip(loop)))]
    writing = [loop for loop in marked if any(i.name == "STTM" for i in graph.code(graph.trip(loop)))]
    found = writing or marked if role == CORRECTION else marked
    inner = [loop for loop in found if not any(other.blocks < loop.blocks for other in found)]
    return sorted(inner, key=lambda loop: graph.blocks[loop.header].first)


def _works(role: str, code: Iterable[Instruction]) -> bool:
    """Whether a loop's code is that of steps over keys."""
    pattern = dict(_MARKS)[SOFTMAX if role == ATTEND else role]
    found = [i.opcode for i in code if pattern.match(i.opcode)]
    if role in (SOFTMAX, ATTEND):
        return len(found) >= _LEAST_EXPONENTIALS
    return bool(found)


def _count(graph: Flow, block: int, pattern: str) -> int:
    return sum(bool(re.match(pattern, i.opcode)) for i in graph.code([block]))
