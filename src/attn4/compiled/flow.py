"""The control flow of a kernel: basic blocks, who dominates whom, and its loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attn4.compiled.listing import Instruction, Listing

_JUMPS = frozenset({"BRA", "BRX", "BRXU", "JMP", "JMX"})
_ENDS = frozenset({"EXIT", "RET", "BPT"})


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions ``first`` to ``last`` (exclusive), which run one after the other."""

    first: int
    last: int
    successors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop: its header, the blocks that jump back to it, and all blocks in between."""

    header: int
    latches: tuple[int, ...]
    blocks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Flow:
    """Blocks by number, in order of address; ``parents`` is the immediate dominator of each, None where
    nothing leads from the first block.
    """

    listing: Listing
    blocks: tuple[Block, ...]
    parents: tuple[int | None, ...]
    loops: tuple[Loop, ...]

    def code(self, blocks: Iterable[int]) -> list[Instruction]:
        """The instructions of ``blocks``, in order of address."""
        return [
            i for n in sorted(blocks) for i in self.listing.code[self.blocks[n].first : self.blocks[n].last]
        ]

    def dominated(self, top: int) -> frozenset[int]:
        """``top`` and all blocks that are reached only through it."""
        return frozenset(n for n in range(len(self.blocks)) if top in self.above(n))

    def above(self, block: int) -> list[int]:
        """The dominators of a block, itself first."""
        chain = [block]
        while chain[-1] != 0:
            parent = self.parents[chain[-1]]
            if parent is None:
                break
            chain.append(parent)
        return chain

    def innermost(self, block: int) -> Loop | None:
        """The smallest loop around a block."""
        around = [loop for loop in self.loops if block in loop.blocks]
        return min(around, key=lambda loop: len(loop.blocks), default=None)

    def trip(self, loop: Loop) -> frozenset[int]:
        """The blocks of one way through a loop. A failed try of a barrier goes on behind the loop, and comes
        back: such blocks are left out, as is every block outside of the header's and the last jump's range.
        """
        end = max(self.blocks[n].last for n in loop.latches)
        begin = self.blocks[loop.header].first
        return frozenset(n for n in loop.blocks if begin <= self.blocks[n].first < end)


def flow(listing: Listing) -> Flow:
    """The control flow of a kernel."""
    blocks = _blocks(listing)
    parents = _immediate_dominators(blocks)
    unlooped = Flow(listing, blocks, parents, ())
    return Flow(listing, blocks, parents, _loops(unlooped))


def _conditional(instruction: Instruction) -> bool:
    """Whether a jump may fall through: under a guard, or with predicates before its target."""
    by_table = len(instruction.targets) > 1
    return bool(instruction.guard) or not (by_table or instruction.operands.startswith("`("))


def _blocks(listing: Listing) -> tuple[Block, ...]:
    code, starts = listing.code, {0}
    for n, instruction in enumerate(code):
        if instruction.name in _JUMPS | _ENDS and n + 1 < len(code):
            starts.add(n + 1)
        if instruction.name in _JUMPS:
            starts.update(listing.labels[label] for label in instruction.targets if label in listing.labels)
    firsts = sorted(start for start in starts if start < len(code))
    number = {first: n for n, first in enumerate(firsts)}
    return tuple(
        Block(first, last, _successors(listing, last, number))
        for first, last in zip(firsts, [*firsts[1:], len(code)], strict=True)
    )


def _successors(listing: Listing, last: int, number: dict[int, int]) -> tuple[int, ...]:
    end = listing.code[last - 1]
    found = []
    if end.name in _JUMPS:
        found += [number[listing.labels[label]] for label in end.targets if label in listing.labels]
    leaves = (end.name in _JUMPS and not _conditional(end)) or (end.name in _ENDS and not end.guard)
    if not leaves and last in number:
        found.append(number[last])
    return tuple(dict.fromkeys(found))


def _immediate_dominators(blocks: Sequence[Block]) -> tuple[int | None, ...]:
    """Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm" (2001)."""
    order = _postorder(blocks)
    rank = {block: n for n, block in enumerate(order)}
    before: dict[int, list[int]] = {n: [] for n in rank}
    for n in rank:
        for successor in blocks[n].successors:
            before[successor].append(n)
    parents: list[int | None] = [None] * len(blocks)
    parents[0] = 0

    def meet(a: int, b: int) -> int:
        while a != b:
            low, high = (a, b) if rank[a] < rank[b] else (b, a)
            parent = parents[low]
            assert parent is not None
            a, b = parent, high
        return a

    changed = True
    while changed:
        changed = False
        for n in reversed(order[:-1]):
            known = [p for p in before[n] if parents[p] is not None]
            best = known[0]
            for other in known[1:]:
                best = meet(best, other)
            changed |= parents[n] != best
            parents[n] = best
    return tuple(parents)


def _postorder(blocks: Sequence[Block]) -> list[int]:
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(blocks[0].successors))]
    while stack:
        block, rest = stack[-1]
        following = next((n for n in rest if n not in seen), None)
        if following is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(blocks[following].successors)))
    return order


def _loops(graph: Flow) -> tuple[Loop, ...]:
    """Natural loops, one for each header: a jump goes back if its target dominates where it comes from."""
    latches: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for n, block in enumerate(graph.blocks):
        for successor in block.successors if graph.parents[n] is not None else ():
            before.setdefault(successor, []).append(n)
            if successor in graph.above(n):
                latches.setdefault(successor, []).append(n)
    loops = []
    for header, ends in latches.items():
        members, waiting = {header}, list(ends)
        while waiting:
            n = waiting.pop()
            if n not in members:
                members.add(n)
                waiting += before.get(n, [])
        loops.append(Loop(header, tuple(ends), frozenset(members)))
    return tuple(sorted(loops, key=lambda loop: graph.blocks[loop.header].first))
