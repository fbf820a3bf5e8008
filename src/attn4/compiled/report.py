"""What was compiled, beside the Plan that asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from attn4.artifact.artifact import Artifact
from attn4.artifact.elf import KernelResources, cubins, kernel_resources
from attn4.compiled.classes import CLASSES, OTHER
from attn4.compiled.code import LoopCode, RoleCode, role_codes
from attn4.compiled.listing import disassemble, parse
from attn4.compiled.roles import ATTEND, CORRECTION, SOFTMAX
from attn4.plan.plan import Plan

REGISTERS_OF_AN_SM = 65536
THREADS_OF_A_WARPGROUP = 128
ROWS_OF_A_PRODUCT = 64
"""Of wgmma, a warpgroup at a time (PTX ISA, wgmma.mma_async)."""


BACKWARD = {SOFTMAX: "compute", ATTEND: "differentiate", CORRECTION: "reduce"}
"""What the roles that do the same in a backward kernel are called in its plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel as ptxas left it: ``resources`` are the cubin's own figures, ``roles`` read in its code."""

    resources: KernelResources
    roles: tuple[RoleCode, ...]

    def role(self, name: str) -> RoleCode:
        """The role of that name. Raises KeyError."""
        found = {role.name: role for role in self.roles}
        return found[name]

    @property
    def stack(self) -> int:
        """Loads and stores of the stack, anywhere in the code."""
        return sum(role.stack for role in self.roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A compiled kernel and its Plan; ``str()`` is the text, ``to_dict()`` the same as data.

    ``seconds`` are those of the artefact's build, by step.
    """

    plan: Plan
    compiled: Compiled
    seconds: dict[str, float]

    @property
    def launch_budget(self) -> int:
        """Registers of a thread at launch, where every thread has as many."""
        return REGISTERS_OF_AN_SM // self.plan.threads // 8 * 8

    @property
    def scores_of_a_thread(self) -> int:
        """Scores that a thread of softmax turns into probabilities in one step of keys."""
        if self.plan.arch == "sm_90a":
            return ROWS_OF_A_PRODUCT * self.plan.tile_n // THREADS_OF_A_WARPGROUP
        return self.plan.tile_n

    def planned(self, role: str) -> int | None:
        """Registers that the Plan gives a role, called as here or so with a number; None if it has none."""
        return next((r.registers for r in self.plan.roles if r.name.rstrip("0123456789") == role), None)

    def problems(self) -> tuple[str, ...]:
        """Where the code does not keep to the Plan: registers over the budget, or other ones than planned."""
        found = []
        launch = self.compiled.resources.registers
        if launch > self.launch_budget:
            found.append(f"{launch} registers a thread at launch, and {self.launch_budget} are there")
        for role in self.compiled.roles:
            planned = self.planned(role.name)
            if planned is not None and role.registers is not None and role.registers != planned:
                found.append(f"{role.name} asks for {role.registers} registers, the plan for {planned}")
            if planned is not None and role.named > planned:
                found.append(f"{role.name} names {role.named} registers, of {planned}")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers, ready for JSON."""
        return {
            **asdict(self.compiled),
            "launch_budget": self.launch_budget,
            "shared_bytes": self.plan.shared_bytes,
            "scores_of_a_thread": self.scores_of_a_thread,
            "stack": self.compiled.stack,
            "problems": list(self.problems()),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        return "\n".join(_text(self))


def read_cubin(cubin: bytes) -> Compiled:
    """Read the longest kernel of a cubin, or of those that a shared object embeds.

    Raises ValueError if there is none, DisassemblerMissingError that says what to install.
    """
    images = list(cubins(cubin)) or [cubin]
    kernels = ((listing, image) for image in images for listing in parse(disassemble(image)))
    listing, image = max(kernels, key=lambda kernel: len(kernel[0].code))
    resources = kernel_resources(b"\0" + image)
    mine = next(kernel for kernel in resources if kernel.name == listing.kernel)
    return Compiled(resources=mine, roles=role_codes(listing))


def read(plan: Plan, artifact: Artifact) -> Report:
    """Read an artefact, which was compiled from ``plan``. Raises as ``read_cubin``."""
    compiled = read_cubin(artifact.library.read_bytes())
    if plan.direction == "backward":
        roles = (replace(role, name=BACKWARD.get(role.name, role.name)) for role in compiled.roles)
        compiled = replace(compiled, roles=tuple(roles))
    return Report(plan=plan, compiled=compiled, seconds=artifact.description.seconds)


def _text(report: Report) -> Iterable[str]:
    resources, plan = report.compiled.resources, report.plan
    seconds = ", ".join(f"{step} {taken:.2f} s" for step, taken in report.seconds.items())
    yield f"Compiled code ({seconds})"
    yield (
        f"  at launch {resources.registers} registers a thread of {report.launch_budget}; stack "
        f"{resources.stack_bytes} bytes a thread, {report.compiled.stack} loads and stores of it; code "
        f"{resources.code_bytes} bytes; shared memory {plan.shared_bytes} bytes"
    )
    yield from _table(_roles(report))
    columns = loop_columns(report.compiled)
    if columns:
        yield ""
        yield "Innermost loops: what a warp issues once through, every barrier found open"
        yield from _table(loop_rows(columns))
    row = next((n for n in (SOFTMAX, ATTEND) if any(r.name == n for r in report.compiled.roles)), None)
    if row is not None and (loop := report.compiled.role(row).steady) is not None:
        scores = report.scores_of_a_thread
        yield f"  {row}: {scores} scores a thread and step, {loop.slots / scores:.2f} issue slots a score"
    yield "  packed instructions (FFMA2, FADD2, FMUL2) do two columns, FMNMX3 takes two more values in"
    for problem in report.problems():
        yield f"  not as planned: {problem}"


def _roles(report: Report) -> Iterable[Sequence[str]]:
    yield ("role", "instructions", "registers", "planned", "highest named", "loads and stores of the stack")
    for role in report.compiled.roles:
        numbers = (role.registers, report.planned(role.name), role.named, role.stack)
        cells = ("-" if number is None else str(number) for number in numbers)
        yield (role.name, str(role.instructions), *cells)


def loop_columns(compiled: Compiled) -> dict[str, LoopCode]:
    """The loops of all roles, each under its role's name, numbered where a role has several."""
    columns: dict[str, LoopCode] = {}
    for role in compiled.roles:
        for number, loop in enumerate(role.loops, 1):
            columns[role.name if len(role.loops) == 1 else f"{role.name} {number}"] = loop
    return columns


def loop_rows(columns: Mapping[str, LoopCode]) -> list[tuple[str, ...]]:
    """A table of loops: a row for each class of which some loop has one, then the issue slots, and those left
    where a step jumps over all that it can, if it can.
    """
    names = (*(name for name, _ in CLASSES), OTHER)
    present = [name for name in names if any(name in loop.counts for loop in columns.values())]
    return [
        ("instruction", *columns),
        *((name, *(str(loop.counts.get(name, 0)) for loop in columns.values())) for name in present),
        ("issue slots", *(str(loop.slots) for loop in columns.values())),
        *(
            [("without long jumps over", *(str(loop.least_slots) for loop in columns.values()))]
            if any(loop.least_slots < loop.slots for loop in columns.values())
            else []
        ),
    ]


def _table(rows: Iterable[Sequence[str]]) -> Iterable[str]:
    lines = list(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        yield "  " + "  ".join(cells)
