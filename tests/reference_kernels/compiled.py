"""Machine code of attn4's forward kernels beside that of flash-attn-4's, compiled in one run; needs no GPU.

``cd tests; python -m reference_kernels.compiled ../docs/results`` writes ``compiled-forward.md`` and
``.json`` there. Each package compiles in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from attn4.compiled import read_cubin
from attn4.emulator.grid import Grid
from attn4.emulator.launch.driver import IN_PROCESS
from attn4.emulator.schedule import RoundRobin
from attn4.machine import machine
from attn4.plan.choose import choose
from attn4.problem import Problem as Asked
from reference_kernels.attention import attend, inputs
from reference_kernels.problem import Problem
from reference_kernels.runtime import device

ARCH = "sm_100a"
SECONDS = 60
SEQLEN = 1024

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
PAIRS = "in pairs"
KERNELS = ("attn4", "flash-attn-4", f"attn4 {PAIRS}", f"flash-attn-4 {PAIRS}")
"""The first two run a tile on one CTA, the others on two where the package would choose to."""

SINGLE_CTA = {"FA_DISABLE_2CTA": "1"}


@dataclass(frozen=True, slots=True)
class Case:
    """One call, and whose kernel for it."""

    head_dim: int
    head_dim_v: int
    causal: bool
    kernel: str

    @property
    def name(self) -> str:
        dims = self.head_dim if self.head_dim == self.head_dim_v else (self.head_dim, self.head_dim_v)
        return f"{dims} {'causal' if self.causal else 'full'}"

    @property
    def problem(self) -> Problem:
        return Problem(
            arch=ARCH, head_dim=self.head_dim, head_dim_v=self.head_dim_v, causal=self.causal,
            seqlen_q=SEQLEN, seqlen_k=SEQLEN,
        )  # fmt: skip


CASES = [Case(*dims, causal, kernel) for dims in DIMS for causal in (False, True) for kernel in KERNELS]
WARM_UP = {kernel: Case(32, 32, True, kernel) for kernel in KERNELS}


class NotBuilt(RuntimeError):
    """There is no such kernel; the text says why."""


def compile_own(case: Case) -> None:
    """Compile attn4's kernel for a case."""
    from attn4.kernels import compile_plan

    problem = case.problem
    asked = Asked(
        batch=problem.batch, seqlen_q=SEQLEN, seqlen_k=SEQLEN, heads=problem.heads, kv_heads=problem.kv_heads,
        head_dim=problem.head_dim, head_dim_v=problem.dim_v, mask=problem.mask,
    )  # fmt: skip
    group = None if case.kernel.endswith(PAIRS) else 1
    plan = choose(asked, machine(ARCH), cta_group=group)
    if group is None and plan.cta_group == 1:
        raise NotBuilt("one CTA")
    compile_plan(plan)


def compile_theirs(case: Case) -> None:
    """Call flash-attn-4, which compiles; nothing runs."""
    attend(case.problem, inputs(case.problem))


def compiled(case: Case) -> dict[str, Any]:
    """A kernel's figures as JSON, in an open device block. Raises NotBuilt, or whatever a compiler raises."""
    kept: list[tuple[bytes, str]] = []
    add = type(IN_PROCESS).add

    def keep(modules: Any, cubin: bytes, ptx: str) -> None:
        kept.append((cubin, ptx))
        add(modules, cubin, ptx)

    compile_it = compile_own if case.kernel.startswith("attn4") else compile_theirs
    with patch.object(type(IN_PROCESS), "add", keep), patch.object(Grid, "run", lambda _: None):
        started = time.process_time()
        compile_it(case)
        seconds = time.process_time() - started
    cubin, ptx = max(kept, key=lambda made: len(made[0]))
    pairs = "cta_group::2" in ptx
    if case.kernel.endswith(PAIRS) != pairs:
        raise NotBuilt("two CTAs" if pairs else "one CTA")
    return {"seconds": round(seconds, 2)} | asdict(read_cubin(cubin))


def rows_of(kernel: str, only: str) -> Iterator[dict[str, Any]]:
    """All cases of a kernel in this process, one of them compiled before the first is timed."""
    cases = [case for case in CASES if case.kernel == kernel and only in case.name]
    with device(ARCH, RoundRobin(), sms=2, seconds=SECONDS):
        if not kernel.startswith("attn4"):
            import flash_attn.cute  # noqa: F401
        for number, case in enumerate([WARM_UP[kernel], *cases]):
            row = {"case": asdict(case), "name": case.name}
            try:
                row |= compiled(case)
            except Exception as error:  # noqa: BLE001  a row says what became of it
                text = str(error).strip().splitlines() or [""]
                row["status"] = f"{type(error).__name__}: {text[0]}"
            if number:
                yield row


def in_a_process(kernel: str, only: str) -> list[dict[str, Any]]:
    """`rows_of` in a process of its own, for the reference reads its environment once."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {} if kernel.endswith(PAIRS) else SINGLE_CTA
    command = [sys.executable, "-W", "ignore", "-m", "reference_kernels.compiled"]
    command += ["--kernel", kernel, "--only", only]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def loops(row: dict[str, Any], role: str) -> list[dict[str, Any]]:
    """The loops of a role, the steady one first."""
    found = next((r["loops"] for r in row["roles"] if r["name"] == role), ())
    return sorted(found, key=lambda loop: loop["slots"])


def registers(row: dict[str, Any]) -> str:
    """Registers of softmax, correction and the other roles."""
    found = {role["name"]: role["registers"] for role in row["roles"]}
    return " ".join(str(found.get(name, "-")) for name in ("softmax", "correction", "mma"))


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line of a table for each kernel."""
    yield (
        "| case | kernel | step of softmax | masked step | step of correction | step of mma | "
        "registers | stack | code | seconds |"
    )
    yield "|" + "---|" * 10
    for row in rows:
        kernel = row["case"]["kernel"]
        if "status" in row:
            if "NotBuilt" not in row["status"]:
                yield f"| {row['name']} | {kernel} | {row['status']} |" + " |" * 7
            continue
        # The loop of products without scores, at the end of a tile, is shorter than the one meant here.
        steps = [loops(row, "softmax"), loops(row, "correction"), loops(row, "mma")[::-1]]
        slots = [str(found[0]["slots"]) if found else "-" for found in steps]
        masked = str(steps[0][-1]["slots"]) if len(steps[0]) > 1 else "-"
        stack = sum(role["stack"] for role in row["roles"])
        code = f"{row['resources']['code_bytes'] // 1024} KB"
        cells = [
            row["name"],
            kernel,
            slots[0],
            masked,
            *slots[1:],
            registers(row),
            stack,
            code,
            row["seconds"],
        ]
        yield "| " + " | ".join(map(str, cells)) + " |"


def softmax_classes(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table of the steady step of softmax by class, a column for each kernel of a single CTA."""
    shown = [
        (f"{row['name']}, {row['case']['kernel']}", loops(row, "softmax")[0]["counts"])
        for row in rows
        if "status" not in row and not row["case"]["kernel"].endswith(PAIRS) and loops(row, "softmax")
    ]
    yield "| instruction | " + " | ".join(name for name, _ in shown) + " |"
    yield "|" + "---|" * (len(shown) + 1)
    for name in dict.fromkeys(name for _, counts in shown for name in counts):
        yield f"| {name} | " + " | ".join(str(counts.get(name, 0)) for _, counts in shown) + " |"


PREFACE = """# Machine code of the forward kernels on Blackwell

Compiled, not run: issue slots that a warp takes for one step of 128 keys, every barrier found open,
read from the machine code of `{arch}` (`attn4 explain --compiled` reads one kernel). A thread of
softmax has a row of 128 scores; a packed instruction does two of them in one slot. `registers` are
those of softmax, correction and mma after setmaxnreg, `stack` the loads and stores of the stack in
the whole kernel, `seconds` CPU time to compile on one core, in a process that has compiled another
before. A masked step of attn4 takes all exponentials from MUFU, so that what is masked is an exact
0; `-`: no loop of its own. bfloat16, batch 1, 2 heads, {seqlen} queries and keys, LSE written.

{date}: attn4 {attn4}, flash-attn-4 {theirs}, CuTe DSL {dsl}. Made by `{command}`.
"""


def document(rows: list[dict[str, Any]]) -> str:
    """The page."""
    preface = PREFACE.format(
        arch=ARCH,
        seqlen=SEQLEN,
        date=time.strftime("%Y-%m-%d"),
        attn4=version("attn4") if _installed("attn4") else "of this checkout",
        theirs=version("flash-attn-4"),
        dsl=version("nvidia-cutlass-dsl"),
        command="cd tests; python -m reference_kernels.compiled ../docs/results",
    )
    parts = [preface, *summary(rows), "", "## The step of softmax without a mask", "", *softmax_classes(rows)]
    return "\n".join(parts) + "\n"


def _installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError

    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference_kernels.compiled", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where to write (default: print the page)")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--kernel", choices=KERNELS, help="one kernel's cases alone, a line of JSON for each")
    given = parser.parse_args(arguments)
    if given.kernel is not None:
        for row in rows_of(given.kernel, given.only):
            print(json.dumps(row), flush=True)
        return 0
    found = [row for kernel in KERNELS for row in in_a_process(kernel, given.only)]
    order = [(case.name, case.kernel) for case in CASES]
    rows = sorted(found, key=lambda row: order.index((row["name"], row["case"]["kernel"])))
    page = document(rows)
    if given.folder is None:
        print(page, end="")
        return 0
    (given.folder / "compiled-forward.md").write_text(page)
    (given.folder / "compiled-forward.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
