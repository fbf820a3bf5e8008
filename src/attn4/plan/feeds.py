"""Feeds and speeds: how long one tile keeps each unit of an SM busy, and which of them binds.

The bound is the busiest unit's time: everything else is taken to overlap. Shared memory counts what the
steady state of a step moves through it: operands that the tensor core reads there, and what the step itself
writes and reads. Not counted are the copies that fill K/V or Q/dO slots (they arrive from L2, once a tile),
row statistics, and the output.

How often an operand is read: an instruction covers ``mma_rows`` x ``mma_columns`` of the result. Operand A
(shared memory only; from tensor memory or registers it is free) is read again for each block of columns, B
for each block of rows. The CTAs of a pair split B between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn4.machine import Machine
from attn4.plan.plan import Plan
from attn4.problem import Direction

Unit = Literal["tensor core", "exponential", "shared memory"]
UNITS: tuple[Unit, ...] = ("tensor core", "exponential", "shared memory")

ELEMENT_BYTES = 2
ACCUMULATOR_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one CTA: ``tile_m`` queries meet ``tile_n`` keys, in 16-bit elements.

    Of a backward pass with ``column_shares`` the CTA owns so large a part of the columns of dK, dV and dQ; it
    keeps ``kept_columns`` of K in tensor memory. ``dq_parts`` products give its dQ transposed, each with
    ``mma_rows`` head dimensions; 0: one gives dQ.
    """

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    direction: Direction = "forward"
    cta_group: int = 1
    column_shares: int = 1
    dq_parts: int = 0
    kept_columns: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Step:
        """The step that ``plan`` takes."""
        return cls(
            tile_m=plan.tile_m,
            tile_n=plan.tile_n,
            head_dim=plan.head_dim,
            head_dim_v=plan.head_dim_v,
            direction=plan.direction,
            cta_group=plan.cta_group,
            column_shares=plan.column_shares,
            dq_parts=plan.dq_parts // plan.column_shares if plan.transposed_dq else 0,
            kept_columns=sum(b.shape[1] for b in plan.buffers if b.name == "kept_keys"),
        )


@dataclass(frozen=True, slots=True)
class Term:
    """A piece of a unit's time, in cycles, and where it comes from."""

    unit: Unit
    name: str
    cycles: float
    arithmetic: str


@dataclass(frozen=True, slots=True)
class Feeds:
    """Cycles that ``step`` keeps each unit busy."""

    step: Step
    terms: tuple[Term, ...]

    def cycles(self, unit: Unit) -> float:
        """Time of one unit."""
        return sum(term.cycles for term in self.terms if term.unit == unit)

    @property
    def bound(self) -> float:
        """Cycles below which no schedule gets."""
        return max(self.cycles(unit) for unit in UNITS)

    @property
    def binds(self) -> tuple[Unit, ...]:
        """The unit that takes that long, or the units, if several do."""
        return tuple(unit for unit in UNITS if self.cycles(unit) == self.bound)

    @property
    def tensor_share(self) -> float:
        """The share of the tensor core's peak that the bound allows."""
        return self.cycles("tensor core") / self.bound


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of one CTA: (rows, depth) times (depth, columns). ``a_shared``: A in shared memory."""

    name: str
    rows: int
    columns: int
    depth: int
    a: str
    b: str
    a_shared: bool


def feeds(machine: Machine, step: Step) -> Feeds:
    """The bound of ``step`` on ``machine``.

    Raises
    ------
    ValueError
        The machine has no instructions for that group of CTAs.
    """
    if step.cta_group not in machine.cta_groups:
        raise ValueError(
            f"{machine.name} works in groups of {' or '.join(map(str, machine.cta_groups))} CTAs, "
            f"not of {step.cta_group}"
        )
    products = forward_products(step) if step.direction == "forward" else backward_products(machine, step)
    terms = [tensor_term(machine, product) for product in products]
    count = step.tile_m * step.tile_n
    terms.append(
        Term(
            "exponential",
            "2^x",
            count / machine.exponentials,
            f"{step.tile_m} x {step.tile_n} / {machine.exponentials}",
        )
    )
    for product in products:
        terms += operand_terms(machine, product, step.cta_group)
    if step.direction == "backward":
        terms += gradient_terms(machine, step)
    return Feeds(step, tuple(terms))


def forward_products(step: Step) -> tuple[Product, ...]:
    """S and O; P stays in registers (Hopper) or tensor memory (Blackwell)."""
    m, n = step.tile_m, step.tile_n
    return (
        Product("S = Q K^T", m, n, step.head_dim, "Q", "K", True),
        Product("O += P V", m, step.head_dim_v, n, "P", "V", False),
    )


def backward_products(machine: Machine, step: Step) -> tuple[Product, ...]:
    """Five products on transposed scores; a pair's CTA owns half the rows of dQ and sums over both's keys."""
    m, n, d, dv, pair = step.tile_m, step.tile_n, step.head_dim, step.head_dim_v, step.cta_group
    own, own_v = d // step.column_shares, dv // step.column_shares
    transposed = Product("dQ^T = K^T dS^T", machine.mma_rows, m, n, "K^T", "dS^T", True)
    kept = step.kept_columns
    of_kept = Product("S^T += K' Q'^T", n, m, kept, "K'", "Q'", False)
    return (
        Product("S^T = K Q^T", n, m, d - kept, "K", "Q", True),
        *((of_kept,) if kept else ()),
        Product("dP^T = V dO^T", n, m, dv, "V", "dO", True),
        Product("dV += P^T dO", n, own_v, m, "P", "dO", False),
        Product("dK += dS^T Q", n, own, m, "dS", "Q", False),
        *((transposed,) * step.dq_parts or (Product("dQ = dS K", m // pair, d, n * pair, "dS", "K", True),)),
    )


def tensor_term(machine: Machine, product: Product) -> Term:
    """Multiply-adds at the peak rate."""
    flops = 2 * product.rows * product.columns * product.depth
    return Term(
        "tensor core",
        product.name,
        flops / machine.tensor_flops,
        f"2 x {product.rows} x {product.columns} x {product.depth} / {machine.tensor_flops}",
    )


def operand_terms(machine: Machine, product: Product, cta_group: int) -> list[Term]:
    """Reads of the operands that lie in shared memory."""
    terms = []
    if product.a_shared:
        times = -(-product.columns // machine.mma_columns)
        size = product.rows * product.depth * ELEMENT_BYTES
        text = f"{product.rows} x {product.depth} x {ELEMENT_BYTES} B"
        terms.append(_traffic(machine, f"{product.a} of {product.name}", size, times, text))
    times = -(-product.rows // machine.mma_rows)
    size = product.depth * product.columns * ELEMENT_BYTES // cta_group
    text = f"{product.depth} x {product.columns} x {ELEMENT_BYTES} B" + (
        " / 2 CTAs" if cta_group == 2 else ""
    )
    terms.append(_traffic(machine, f"{product.b} of {product.name}", size, times, text))
    return terms


def _traffic(machine: Machine, name: str, size: int, times: int, text: str) -> Term:
    repeated = f"{times} x " if times > 1 else ""
    cycles = size * times / machine.shared_bytes
    return Term("shared memory", name, cycles, f"{repeated}{text} / {machine.shared_bytes}")


def gradient_terms(machine: Machine, step: Step) -> list[Term]:
    """dS, written for dQ; its half for the peer; and dQ, written and read again by the bulk reduction."""
    m, n, d, pair = step.tile_m, step.tile_n, step.head_dim // step.column_shares, step.cta_group
    terms = [_traffic(machine, "dS written", m * n * ELEMENT_BYTES, 1, f"{m} x {n} x {ELEMENT_BYTES} B")]
    if pair == 2:
        half = m * n * ELEMENT_BYTES // 2
        text = f"{half} B / {machine.shared_bytes} sent + {half} B / {machine.dsmem_bytes} received"
        cycles = half / machine.shared_bytes + half / machine.dsmem_bytes
        terms.append(Term("shared memory", "dS exchanged (DSMEM)", cycles, text))
    rows = m // pair
    text = f"{rows} x {d} x {ACCUMULATOR_BYTES} B"
    terms.append(_traffic(machine, "dQ written and reduced", rows * d * ACCUMULATOR_BYTES, 2, text))
    return terms
