"""How long CTAs wait for their turn to add to dQ in the deterministic backward pass. Modelled.

A tile of keys takes a step for each query block that sees it, each the bound of feeds and speeds, and adds to
that block's sums when all tiles of the same head that come before it in the grid have; ``LATENCY`` later the
next may. Tiles are dealt to SMs one by one in the order of the grid. So the figures compare orders: they are
no prediction of a time. ``python -m attn4.plan.turns`` prints the table in docs/measured-facts.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from attn4.machine import Machine, machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.plan.feeds import Step, feeds
from attn4.plan.plan import Plan
from attn4.plan.tiles import blocks_met
from attn4.problem import Problem

LATENCY = 2000
"""Cycles from the end of a step until another SM has seen that its dQ is added: a reduction in L2, a release
and an acquire. Assumed: no Blackwell was measured.
"""

ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Order:
    """An order of the grid: ``last_first``, the last keys of a sequence first; ``interleaved``, equal blocks
    of the heads of an L2-sized section side by side, not the blocks of one head; ``turned_end``, the last
    section the other way round, its tiles from the last query block to the first.
    """

    last_first: bool
    interleaved: bool
    turned_end: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Order:
        """That of a backward plan."""
        schedule = plan.schedule
        return cls(schedule.order == "shortest_first", schedule.order != "linear", schedule.turned_end)


@dataclass(frozen=True, slots=True)
class Turns:
    """``cycles`` until the last SM is done, and ``waiting`` of all SMs for their turns."""

    cycles: float
    waiting: float
    working: float

    @property
    def share(self) -> float:
        """Of the SMs' busy time, what they wait."""
        return self.waiting / (self.waiting + self.working)


def turns(problem: Problem, plan: Plan, where: Machine, order: Order, *, lock: bool = True) -> Turns:
    """The model of a backward plan in ``order``; without ``lock`` nobody waits. No lengths that differ."""
    cost = feeds(where, Step.of(plan)).bound
    free = [0.0] * (where.sms // plan.cta_group)
    added: dict[tuple[int, int, int], float] = {}
    waiting = working = 0.0
    for block, head in tiles(problem, plan, order):
        now = free[0]
        for member, query_block in walk(problem, plan, order, (block, head)):
            now += cost
            working += cost
            place = (head, member, query_block)
            turn = added.get(place, 0.0) if lock else 0.0
            waiting += max(turn - now, 0.0)
            now = max(turn, now)
            added[place] = now + LATENCY
        heapq.heapreplace(free, now)
    return Turns(max(free), waiting, working)


def tiles(problem: Problem, plan: Plan, order: Order) -> Iterator[tuple[int, int]]:
    """(key block, key head of the batch) in the order of the grid."""
    heads = problem.batch * problem.kv_heads
    blocks = list(range(-(-problem.seqlen_k // (plan.tile_n * plan.cta_group))))
    if order.last_first:
        blocks.reverse()
    if not order.interleaved:
        yield from ((block, head) for head in range(heads) for block in blocks)
        return
    front = heads - turned_heads(problem, plan, order)
    together = section_heads(problem, plan)
    for first in range(0, front, together):
        section = range(first, min(first + together, front))
        yield from ((block, head) for block in blocks for head in section)
    yield from ((block, head) for block in reversed(blocks) for head in range(front, heads))


def section_heads(problem: Problem, plan: Plan) -> int:
    """Key heads that are worked on together, if there are so many."""
    row_bytes = (plan.head_dim + plan.head_dim_v) * ELEMENT_BYTES
    return max(plan.schedule.section_bytes // row_bytes // max(problem.seqlen_q, 1), 1)


def turned_heads(problem: Problem, plan: Plan, order: Order) -> int:
    """The last key heads of the batch that are taken the other way round."""
    heads = problem.batch * problem.kv_heads
    return min(section_heads(problem, plan), heads // 2) if order.turned_end else 0


def walk(problem: Problem, plan: Plan, order: Order, tile: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(query head of the group, query block) of each step of a tile, (key block, key head)."""
    block, head = tile
    blocks, members = query_blocks(problem, plan, block), range(problem.group)
    if not order.turned_end:
        yield from product(members, blocks)
        return
    descending = head >= problem.batch * problem.kv_heads - turned_heads(problem, plan, order)
    for query_block in reversed(blocks) if descending else blocks:
        yield from ((member, query_block) for member in members)


def query_blocks(problem: Problem, plan: Plan, block: int) -> range:
    """The query blocks that see some key of a block."""
    size = plan.tile_n * plan.cta_group
    first = block * size
    last = min(first + size, problem.seqlen_k) - 1
    shift = problem.seqlen_q - problem.seqlen_k
    left, right = problem.mask.left, problem.mask.right
    low = 0 if right is None else max(0, first + shift - right)
    count = blocks_met(Mask(right, left), (first, last), shift, (problem.seqlen_q, plan.tile_m))
    return range(low // plan.tile_m, low // plan.tile_m + count)


ORDERS = {
    "naive": Order(last_first=False, interleaved=False),
    "longest first": Order(last_first=False, interleaved=True),
    "shortest first": Order(last_first=True, interleaved=False),
    "shortest first, interleaved": Order(last_first=True, interleaved=True),
    "the same, end turned": Order(last_first=True, interleaved=True, turned_end=True),
}
"""By name: what the table compares. Under a causal mask the last keys are those of the shortest tiles."""

SIZES = ((8, 16, 2048), (4, 16, 4096), (2, 16, 8192), (1, 16, 16384))
"""(batch, heads, length) of the table's rows: 16,384 tokens each."""


def table() -> Iterator[str]:
    """Rows of Markdown: time without turns over the bound, linear and as plans do; each order's speed with
    turns as a share of the better, and the share of waiting.
    """
    where = machine("sm_100a")
    names = " | ".join(ORDERS)
    yield f"| mask | batch x heads x length | linear | other | {names} |"
    yield "|---|---|---|---|" + "|".join(["---"] * len(ORDERS)) + "|"
    for mask in (Mask(), Mask.of(True)):
        for batch, heads, length in SIZES:
            problem = Problem(
                batch=batch,
                seqlen_q=length,
                seqlen_k=length,
                heads=heads,
                kv_heads=heads,
                head_dim=128,
                head_dim_v=128,
                mask=mask,
                direction="backward",
                deterministic=True,
            )
            plan = choose(problem, where, cta_group=1)
            other = choose(replace(problem, deterministic=False), where, cta_group=1)
            linear = turns(problem, plan, where, ORDERS["naive"], lock=False)
            free = turns(problem, other, where, Order.of(other), lock=False)
            bound = free.working / where.sms
            found = [turns(problem, plan, where, order) for order in ORDERS.values()]
            cells = [f"{free.cycles / each.cycles:.0%} ({each.share:.0%})" for each in found]
            without = f"{linear.cycles / bound:.2f} | {free.cycles / bound:.2f}"
            yield f"| {mask.kind} | {batch} x {heads} x {length} | {without} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table()))
