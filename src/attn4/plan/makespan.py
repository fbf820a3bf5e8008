"""How long a schedule takes: tiles dealt to the SMs of a machine, one by one, in their order. Modelled.

A tile costs its steps, each the bound of feeds and speeds; starting and ending a tile cost nothing. So the
figures compare orders: they are no prediction of a time. ``python -m attn4.plan.makespan`` prints the tables
in docs/measured-facts.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from attn4.machine import MACHINES, Machine
from attn4.mask import Mask
from attn4.plan import sm100
from attn4.plan.choose import choose
from attn4.plan.feeds import Step, feeds
from attn4.plan.launch_control import with_launch_control
from attn4.plan.order import Batch, tiles_in_order
from attn4.plan.plan import Plan, Schedule
from attn4.problem import Problem

MOST_TILES = 200_000
"""More tiles than these take seconds to deal, and no order of so many leaves SMs idle for long."""


@dataclass(frozen=True, slots=True)
class Makespan:
    """``cycles`` until the last SM is done. No schedule is done before ``bound``: the work shared out evenly,
    or the longest tile.
    """

    cycles: float
    bound: float
    tiles: int

    @property
    def ratio(self) -> float:
        """Time over the bound."""
        return self.cycles / self.bound if self.bound else 1.0


def makespan(plan: Plan, machine: Machine, batch: Batch, *, held: int = 0) -> Makespan:
    """Of ``batch`` under the schedule of ``plan``, a forward plan.

    Other work has ``held`` of the places until the end. A persistent grid is as large as the machine all the
    same: its last CTAs start when others are done, with the tile or the share that they begin with.
    """
    cost = feeds(machine, Step.of(plan)).bound
    costs = [tile.steps * cost for tile in tiles_in_order(plan, batch)]
    ctas = machine.sms // plan.cta_group
    slots = ctas - held
    bound = max(sum(costs) / slots, max(costs, default=0.0))
    pieces = costs
    if not plan.schedule.dynamic:
        pieces = [sum(costs[cta::ctas]) for cta in range(ctas)]
    elif plan.schedule.counted:
        pieces = costs[:slots] + costs[ctas:] + costs[slots:ctas]
    return Makespan(deal(pieces, slots), bound, len(costs))


def deal(costs: Sequence[float], slots: int) -> float:
    """When the last of ``slots`` is done, if whoever is free first takes the next piece of work."""
    free = [0.0] * slots
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def alternatives(plan: Plan) -> dict[str, Plan]:
    """``plan`` under other schedules, by name: what tables compare."""
    longest = replace(plan.schedule, order="longest_first", dynamic=True, sorted_batches=False)
    schedules = {
        "dealt": Schedule("linear"),
        "linear": replace(longest, order="linear"),
        "longest first": longest,
        "sorted": replace(longest, sorted_batches=True),
    }
    return {name: replace(plan, schedule=schedule) for name, schedule in schedules.items()}


CAUSAL = Mask.of(True)
DENSE = ((4, 16, 4096), (1, 16, 4096), (1, 16, 16384), (1, 4, 16384))
"""(batch, heads, length) of the causal rows of the table."""

RAGGED = {
    "63 x 256, 16384": (256,) * 63 + (16384,),
    "255 x 64, 8192": (64,) * 255 + (8192,),
    "128, 256, ... 16384": tuple(2**n for n in range(7, 15)),
    "4096, 12288": (4096, 12288),
    "8 x 2048": (2048,) * 8,
}
"""Lengths of packed batches, in the order in which they are given."""

INTRODUCTION = """\
| machine | D | mask | heads | lengths | tiles | bound, us | {} |
|---|---|---|---|---|---|---|{}|"""


def table() -> Iterator[str]:
    """Rows of Markdown: the bound, and each schedule's time over it."""
    names = ("dealt", "linear", "longest first", "sorted")
    yield INTRODUCTION.format(" | ".join(names), "|".join(["---"] * len(names)))
    for machine in MACHINES[:2]:
        for head_dim in (64, 128):
            for size, heads, length in DENSE:
                problem = _problem(size, heads, length, head_dim, CAUSAL)
                yield _row(machine, problem, Batch.of(problem), f"{size} x {length}")
            for name, lengths in RAGGED.items():
                for mask in (Mask(), CAUSAL):
                    problem = _problem(len(lengths), 16, max(lengths), head_dim, mask, packed=True)
                    yield _row(machine, problem, Batch.self_attention(lengths, 16, mask), name)


HELD = 8
"""SMs that other work has in the second table."""


def held_table() -> Iterator[str]:
    """Rows of Markdown: the same where other work has some SMs, and CTAs may be taken over (Blackwell)."""
    names = ("dealt", "longest first", "taken over")
    yield INTRODUCTION.format(" | ".join(names), "|".join(["---"] * len(names)))
    machine = MACHINES[1]
    for (size, heads, length), mask in product(DENSE, (Mask(), CAUSAL)):
        problem = _problem(size, heads, length, 128, mask)
        plan = choose(problem, machine, cta_group=1)
        plans = {name: found for name, found in alternatives(plan).items() if name in names}
        schedule = plan.schedule if plan.schedule.dynamic else Schedule("linear", dynamic=True)
        plans["taken over"] = with_launch_control(sm100.forward(problem, machine, schedule=schedule))
        found = {name: makespan(each, machine, Batch.of(problem), held=HELD) for name, each in plans.items()}
        yield _cells(machine, problem, f"{size} x {length}", found)


def _problem(
    batch: int, heads: int, length: int, head_dim: int, mask: Mask, *, packed: bool = False
) -> Problem:
    return Problem(
        batch=batch,
        seqlen_q=length,
        seqlen_k=length,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        mask=mask,
        cu_seqlens_q=packed,
        cu_seqlens_k=packed,
    )


def _row(machine: Machine, problem: Problem, batch: Batch, lengths: str) -> str:
    plans = alternatives(choose(problem, machine))
    found = {name: makespan(plan, machine, batch) for name, plan in plans.items()}
    return _cells(machine, problem, lengths, found)


def _cells(machine: Machine, problem: Problem, lengths: str, found: dict[str, Makespan]) -> str:
    first = next(iter(found.values()))
    microseconds = first.bound / (machine.clock_ghz * 1000)
    ratios = (
        "-" if name == "sorted" and not problem.cu_seqlens_q else f"{each.ratio:.2f}"
        for name, each in found.items()
    )
    cells = (machine.chip, problem.head_dim, problem.mask.kind, problem.heads, lengths, first.tiles)
    return "| " + " | ".join([*map(str, cells), f"{microseconds:.0f}", *ratios]) + " |"


if __name__ == "__main__":
    print("\n".join([*table(), "", *held_table()]))
