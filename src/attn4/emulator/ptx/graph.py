"""Basic blocks of a kernel, and which of them dominate which.

Dominators by Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm" (2001).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attn4.emulator.ptx.errors import PtxError
from attn4.emulator.ptx.module import BasicBlock, Instruction, Label

ENDS = frozenset(("ret", "exit", "trap"))
BRANCHES = frozenset(("bra", "brx"))


def basic_blocks(
    items: Sequence[Instruction | Label], targets: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[BasicBlock, ...], dict[str, int]]:
    """Blocks of a kernel's instructions and labels, in their order, and the block that each label starts.

    A block ends before a label and after a branch, ``ret``, ``exit`` or ``trap``; a kernel whose text ends
    ends there. Post-dominators follow the paths that go on: a lane that a guarded ``exit`` takes away and a
    path into ``trap`` meet nobody again, so they do not keep the other lanes from meeting.
    """
    bodies, starts = _bodies(items)
    names: dict[int, str] = {}
    for name, index in starts.items():
        names.setdefault(index, name)
    successors = [_successors(index, bodies, starts, targets) for index in range(len(bodies))]
    dominators = immediate_dominators(successors, 0)
    post_dominators = _post_dominators(bodies, successors)
    blocks = tuple(
        BasicBlock(
            index, names.get(index), tuple(body), successors[index], dominators[index], post_dominators[index]
        )
        for index, body in enumerate(bodies)
    )
    return blocks, starts


def _bodies(items: Sequence[Instruction | Label]) -> tuple[list[list[Instruction]], dict[str, int]]:
    body: list[Instruction] = []
    bodies = [body]
    starts: dict[str, int] = {}
    ended = False
    for item in items:
        label = isinstance(item, Label)
        if ended or (label and body):
            body = []
            bodies.append(body)
        if isinstance(item, Label):
            starts[item.name] = len(bodies) - 1
            ended = False
        else:
            body.append(item)
            ended = item.opcode in ENDS or item.opcode in BRANCHES
    return bodies, starts


def _successors(
    index: int,
    bodies: list[list[Instruction]],
    starts: Mapping[str, int],
    targets: Mapping[str, tuple[str, ...]],
) -> tuple[int, ...]:
    following = (index + 1,) if index + 1 < len(bodies) else ()
    last = bodies[index][-1] if bodies[index] else None
    if last is None or last.opcode not in ENDS | BRANCHES:
        return following
    jumps: tuple[int, ...] = ()
    if last.opcode in BRANCHES:
        jumps = tuple(starts[name] for name in _targets(last, starts, targets))
    return tuple(dict.fromkeys(jumps + following if last.guard else jumps))


def _targets(
    branch: Instruction, starts: Mapping[str, int], targets: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    label = branch.operands[-1] if branch.operands else None
    if isinstance(label, Label) and len(branch.operands) == (1 if branch.opcode == "bra" else 2):
        if branch.opcode == "bra" and label.name in starts:
            return (label.name,)
        if branch.opcode == "brx" and label.name in targets:
            return targets[label.name]
    raise PtxError(f"{branch.text} goes nowhere", branch.line)


def _post_dominators(
    bodies: list[list[Instruction]], successors: Sequence[tuple[int, ...]]
) -> list[int | None]:
    end = len(bodies)
    backwards: list[list[int]] = [[] for _ in range(end + 1)]
    for index, (body, following) in enumerate(zip(bodies, successors, strict=True)):
        for successor in following:
            backwards[successor].append(index)
        if not following and not (body and body[-1].opcode == "trap"):
            backwards[end].append(index)
    found = immediate_dominators(backwards, end)
    return [None if block == end else block for block in found[:end]]


def immediate_dominators(successors: Sequence[Sequence[int]], entry: int) -> list[int | None]:
    """The immediate dominator of each node of a graph; None for ``entry`` and nodes it does not lead to."""
    order = _postorder(successors, entry)
    rank = {node: position for position, node in enumerate(order)}
    predecessors: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for successor in successors[node]:
            predecessors[successor].append(node)
    dominator = {entry: entry}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            candidates = [before for before in predecessors[node] if before in dominator]
            found = candidates[0]
            for other in candidates[1:]:
                found = _meet(found, other, dominator, rank)
            changed |= dominator.get(node) != found
            dominator[node] = found
    del dominator[entry]
    return [dominator.get(node) for node in range(len(successors))]


def _meet(one: int, other: int, dominator: Mapping[int, int], rank: Mapping[int, int]) -> int:
    while one != other:
        if rank[one] < rank[other]:
            one = dominator[one]
        else:
            other = dominator[other]
    return one


def _postorder(successors: Sequence[Sequence[int]], entry: int) -> list[int]:
    order: list[int] = []
    seen = {entry}
    path = [(entry, iter(successors[entry]))]
    while path:
        node, remaining = path[-1]
        for successor in remaining:
            if successor not in seen:
                seen.add(successor)
                path.append((successor, iter(successors[successor])))
                break
        else:
            path.pop()
            order.append(node)
    return order
