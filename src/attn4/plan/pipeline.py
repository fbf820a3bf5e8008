"""How long a step of the Blackwell backward takes, as products and elementwise work wait for each other.

The tensor core takes products one by one in the order of issue, each as long as feeds and speeds give it: its
operations, or its operands in shared memory. The computing warps take P of a step and then dS. Constants of
hand-overs are assumed, as no Blackwell was measured: the figures compare orders, they predict no time.
``python -m attn4.plan.pipeline`` prints the table in docs/measured-facts.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attn4.machine import Machine, machine
from attn4.plan.choose import choose
from attn4.plan.feeds import Step, feeds
from attn4.plan.plan import Plan
from attn4.problem import Problem

HANDING = 100
"""Cycles from the end of work until another role begins with it: a barrier and fences. Assumed."""

READING = 150
"""Cycles in which the reducing warps read dQ, so that its columns are free. Assumed."""

GRADIENT = 400
"""Cycles of dS of a step. Estimated: some 200 issue slots of each of eight warps, of which four issue in a
cycle.
"""

STORING = 60
"""Cycles at the end of dS, in which it goes to shared memory. Estimated as ``GRADIENT``."""

STEPS = 64

PRODUCTS = {"S": "S^T", "dP": "dP^T", "dV": "dV", "dK": "dK", "dQ": "dQ"}
"""Names of products here, and how those of feeds and speeds begin."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Cycles of each product by name, of the exponentials of a step, and until dS of the peer has come."""

    products: dict[str, float]
    exponentials: float
    exchange: float

    @classmethod
    def of(cls, plan: Plan, where: Machine, exchange: float) -> Costs:
        """Those of a backward plan."""
        found = feeds(where, Step.of(plan))

        def product(start: str) -> float:
            tensor = sum(
                t.cycles for t in found.terms if t.unit == "tensor core" and t.name.startswith(start)
            )
            operands = sum(
                t.cycles
                for t in found.terms
                if t.unit == "shared memory" and t.name.partition(" of ")[2].startswith(start)
            )
            return max(tensor, operands)

        products = {name: product(start) for name, start in PRODUCTS.items()}
        return cls(products, found.cycles("exponential"), exchange if plan.cta_group > 1 else 0.0)


class Pipeline:
    """The units' clocks: when the tensor core and the computing warps are free, and what is done when."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.tensor = 0.0
        self.computing = 0.0
        self.end: dict[str, float] = {}

    def multiply(self, name: str, *after: str) -> None:
        """The next product, after what is named has been handed over."""
        start = max(self.tensor, *(self.end.get(other, 0.0) for other in after), 0.0)
        self.tensor = start + self.costs.products[name]
        self.end[name] = self.tensor + HANDING

    def take_exponentials(self) -> None:
        """P of the S that was issued last."""
        self.computing = max(self.computing, self.end["S"]) + self.costs.exponentials
        self.end["P"] = self.computing + HANDING

    def differentiate(self, *after: str) -> None:
        """Take dS, of the dP that was issued last; it goes to shared memory after what is named."""
        done = max(self.computing, self.end["dP"]) + GRADIENT
        self.computing = max(done, *(self.end.get(other, 0.0) + STORING for other in after), 0.0)
        self.end["dS"] = self.computing + HANDING
        self.end["whole"] = self.computing + HANDING + self.costs.exchange

    def reduce(self) -> None:
        """Take dQ out of its columns."""
        self.end["taken"] = self.end["dQ"] + READING

    def step(self, plan: Plan) -> None:
        """The products of a step in the order of ``plan``, with those that are late from the step before."""
        if plan.cta_group == 1:
            self.multiply("S")
            self.take_exponentials()
            self.multiply("dK", "dS")
            self.multiply("dQ")
            self.reduce()
            self.multiply("dP", "taken")
            self.multiply("dV", "P")
            self.differentiate()
            return
        self.multiply("S", "taken")
        self.take_exponentials()
        self.multiply("dK", "dS")
        if not plan.dq_first:
            self.multiply("dP")
        self.multiply("dQ", "P", "whole")
        self.reduce()
        if plan.dq_first:
            self.multiply("dP")
        self.multiply("dV", "P")
        self.differentiate("dQ")


def cycles(plan: Plan, where: Machine, exchange: float) -> float:
    """Of a step of a backward plan, once steps follow each other evenly; at least the bound of its feeds and
    speeds. ``exchange``: from the end of dS until the leader knows that the peer's half has come.
    """
    costs = Costs.of(plan, where, exchange)
    pipeline = Pipeline(costs)
    for _ in range(STEPS):
        pipeline.step(plan)
    half = pipeline.tensor
    for _ in range(STEPS):
        pipeline.step(plan)
    return max((pipeline.tensor - half) / STEPS, feeds(where, Step.of(plan)).bound)


EXCHANGES = (500, 1000, 1500, 2000, 3000)


def table() -> Iterator[str]:
    """Rows of Markdown: cycles of a step at D 128, by how long the exchange of dS takes."""
    where = machine("sm_100a")
    problem = Problem(
        batch=1,
        seqlen_q=4096,
        seqlen_k=4096,
        heads=16,
        kv_heads=16,
        head_dim=128,
        head_dim_v=128,
        direction="backward",
    )
    single, pair = (choose(problem, where, cta_group=group) for group in (1, 2))
    plans = (single, replace(pair, dq_first=True), pair)
    yield "| exchange | single CTAs | pairs, dQ first | pairs, dP first |"
    yield "|---|---|---|---|"
    for exchange in EXCHANGES:
        yield f"| {exchange} | {' | '.join(f'{cycles(plan, where, exchange):.0f}' for plan in plans)} |"


if __name__ == "__main__":
    print("\n".join(table()))
