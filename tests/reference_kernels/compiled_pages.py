"""Pages of docs/results about machine code, made of the rows of `compiled`: counts per step and role."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Row = dict[str, Any]

ARCH = "sm_100a"
SEQLEN = 1024
PAIRS = "in pairs"
"""Ends the name of a kernel of which two CTAs share a tile."""


def loops(row: Row, role: str) -> list[dict[str, Any]]:
    """The loops of a role, the steady one first."""
    found = next((r["loops"] for r in row["roles"] if r["name"] == role), ())
    return sorted(found, key=lambda loop: loop["slots"])


def least_slots(loop: dict[str, Any]) -> int:
    """Issue slots of a step that jumps over all that it can."""
    return sum(loop["least"].values())


def registers(row: Row) -> str:
    """Registers of softmax, correction and the other roles."""
    found = {role["name"]: role["registers"] for role in row["roles"]}
    return " ".join(str(found.get(name, "-")) for name in ("softmax", "correction", "mma"))


def table(names: tuple[str, ...], rows: list[Row], cells: Any) -> Iterator[str]:
    """A line for each kernel: its case, whose it is, and ``cells``; a kernel that is not built has none."""
    yield "| case | kernel | " + " | ".join(names) + " |"
    yield "|" + "---|" * (len(names) + 2)
    for row in rows:
        head = f"| {row['name']} | {row['case']['kernel']} | "
        if "status" not in row:
            yield head + " | ".join(map(str, cells(row))) + " |"
        elif "NotBuilt" not in row["status"]:
            yield head + row["status"] + " |" + " |" * (len(names) - 1)


def totals(row: Row) -> tuple[object, ...]:
    """Registers, accesses of the stack, code and seconds of a kernel."""
    stack = sum(role["stack"] for role in row["roles"])
    return registers(row), stack, f"{row['resources']['code_bytes'] // 1024} KB", row["seconds"]


def forward_cells(row: Row) -> tuple[object, ...]:
    """What the page about forward kernels says of one."""
    # The loop of products without scores, at the end of a tile, is shorter than the one meant here.
    steps = [loops(row, "softmax"), loops(row, "correction"), loops(row, "mma")[::-1]]
    slots = [str(found[0]["slots"]) if found else "-" for found in steps]
    masked = str(steps[0][-1]["slots"]) if len(steps[0]) > 1 else "-"
    return slots[0], masked, *slots[1:], *totals(row)


def backward_cells(row: Row) -> tuple[object, ...]:
    """What the page about backward kernels says of one; a role may do a step in several loops."""
    compute = loops(row, "softmax")
    others = [sum(loop["slots"] for loop in loops(row, role)) for role in ("correction", "mma", "load")]
    return sum(map(least_slots, compute)), sum(loop["slots"] for loop in compute), *others, *totals(row)


def classes(rows: list[Row], counts: Any) -> Iterator[str]:
    """A table of a step by class of instruction, a column for each kernel of a single CTA."""
    shown = [
        (f"{row['name']}, {row['case']['kernel']}", counts(loops(row, "softmax")[0]))
        for row in rows
        if "status" not in row and not row["case"]["kernel"].endswith(PAIRS) and loops(row, "softmax")
    ]
    yield "| instruction | " + " | ".join(name for name, _ in shown) + " |"
    yield "|" + "---|" * (len(shown) + 1)
    for name in dict.fromkeys(name for _, found in shown for name in found):
        yield f"| {name} | " + " | ".join(str(found.get(name, 0)) for _, found in shown) + " |"


FORWARD = """# Machine code of the forward kernels on Blackwell

Compiled, not run: issue slots that a warp takes for one step of 128 keys, every barrier found open,
read from the machine code of `{arch}` (`attn4 explain --compiled` reads one kernel). A thread of
softmax has a row of 128 scores; a packed instruction does two of them in one slot. `registers` are
those of softmax, correction and mma after setmaxnreg, `stack` the loads and stores of the stack in
the whole kernel, `seconds` CPU time to compile on one core, in a process that has compiled another
before. A masked step of attn4 takes all exponentials from MUFU, so that what is masked is an exact
0; `-`: no loop of its own. bfloat16, batch 1, 2 heads, {seqlen} queries and keys, LSE written.

{date}: attn4 {attn4}, flash-attn-4 {theirs}, CuTe DSL {dsl}. Made by `{command}`.
"""

BACKWARD = """# Machine code of the backward kernels on Blackwell

Compiled, not run: issue slots that a warp takes for one step of 128 queries and 128 keys a CTA, every
barrier found open, read from the machine code of `{arch}` (`attn4 explain --compiled --backward` reads
one kernel). `compute` has eight warps, a thread of which has 64 scores: without what long branches jump
over, the mask, and with it. `reduce` has four warps and adds dQ; `mma` and `load` have one. Where a role
does a step in several loops their slots are added. `registers` are those of compute, reduce and mma after
setmaxnreg, `stack` the loads and stores of the stack in the whole kernel, `seconds` CPU time on one core
to compile the three kernels of the pass, in a process that has compiled others before; where the second
kernel alone is new to the reference, which shares the others between cases, only that is in its seconds.
bfloat16, batch 1, 2 heads, {seqlen} queries and keys, no gradient of the LSE.

{date}: attn4 {attn4}, flash-attn-4 {theirs}, CuTe DSL {dsl}. Made by `{command}`.
"""


def document(rows: list[Row], backward: bool) -> str:
    """The page of a direction."""
    preface = (BACKWARD if backward else FORWARD).format(
        arch=ARCH,
        seqlen=SEQLEN,
        date=time.strftime("%Y-%m-%d"),
        attn4=_version("attn4"),
        theirs=_version("flash-attn-4"),
        dsl=_version("nvidia-cutlass-dsl"),
        command="cd tests; python -m reference_kernels.compiled ../docs/results"
        + (" --backward" if backward else ""),
    )
    ends = ("registers", "stack", "code", "seconds")
    if backward:
        names = ("compute", "masked", "reduce", "mma", "load", *ends)
        parts = [preface, *table(names, rows, backward_cells), "", "## A step of compute without a mask", ""]
        parts += classes(rows, lambda loop: loop["least"])
    else:
        names = ("step of softmax", "masked step", "step of correction", "step of mma", *ends)
        parts = [preface, *table(names, rows, forward_cells), "", "## The step of softmax without a mask", ""]
        parts += classes(rows, lambda loop: loop["counts"])
    return "\n".join(parts) + "\n"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of this checkout"
