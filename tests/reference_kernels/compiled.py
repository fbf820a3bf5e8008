"""Machine code of attn4's kernels beside that of flash-attn-4's, compiled in one run; needs no GPU.

``cd tests; python -m reference_kernels.compiled ../docs/results`` writes ``compiled-forward.md`` and
``.json`` there, with ``--backward`` those of gradients. Each package compiles in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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
from reference_kernels.compiled_pages import ARCH, PAIRS, SEQLEN, document
from reference_kernels.problem import Problem
from reference_kernels.runtime import device

SECONDS = 60

DIMS = {False: ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)), True: ((64, 64), (128, 128))}
"""Head dimensions of both directions, by whether gradients are meant."""

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
    backward: bool = False

    @property
    def name(self) -> str:
        dims = self.head_dim if self.head_dim == self.head_dim_v else (self.head_dim, self.head_dim_v)
        return f"{dims} {'causal' if self.causal else 'full'}"

    @property
    def problem(self) -> Problem:
        return Problem(
            arch=ARCH, head_dim=self.head_dim, head_dim_v=self.head_dim_v, causal=self.causal,
            seqlen_q=SEQLEN, seqlen_k=SEQLEN, backward=self.backward,
        )  # fmt: skip


def cases(backward: bool) -> list[Case]:
    """All cases of a direction, in the order of its page."""
    masks = (False, True)
    return [
        Case(*dims, causal, kernel, backward)
        for dims in DIMS[backward]
        for causal in masks
        for kernel in KERNELS
    ]


class NotBuilt(RuntimeError):
    """There is no such kernel; the text says why."""


def own(case: Case) -> Callable[[], object]:
    """What compiles attn4's kernel for a case. Raises NotBuilt."""
    from attn4.kernels import compile_plan

    problem = case.problem
    asked = Asked(
        batch=problem.batch, seqlen_q=SEQLEN, seqlen_k=SEQLEN, heads=problem.heads, kv_heads=problem.kv_heads,
        head_dim=problem.head_dim, head_dim_v=problem.dim_v, mask=problem.mask, lse=not case.backward,
        direction="backward" if case.backward else "forward",
    )  # fmt: skip
    group = None if case.kernel.endswith(PAIRS) else 1
    plan = choose(asked, machine(ARCH), cta_group=group)
    if group is None and plan.cta_group == 1:
        raise NotBuilt("one CTA")
    return lambda: compile_plan(plan)


def theirs(case: Case) -> Callable[[], object]:
    """A call of flash-attn-4, which compiles; nothing runs. Of gradients it compiles what they alone need."""
    given = inputs(case.problem)
    if not case.backward:
        return lambda: attend(case.problem, given)
    from flash_attn.cute import flash_attn_func

    q, k, v = (x.requires_grad_() for x in (given.q, given.k, given.v))
    out = flash_attn_func(q, k, v, causal=case.causal, return_lse=True)[0]
    return lambda: out.backward(given.grad_out)


def compiled(case: Case) -> dict[str, Any]:
    """A kernel's figures as JSON, in an open device block. Raises NotBuilt, or whatever a compiler raises."""
    kept: list[tuple[bytes, str]] = []
    add = type(IN_PROCESS).add

    def keep(modules: Any, cubin: bytes, ptx: str) -> None:
        kept.append((cubin, ptx))
        add(modules, cubin, ptx)

    prepare = own if case.kernel.startswith("attn4") else theirs
    with patch.object(type(IN_PROCESS), "add", keep), patch.object(Grid, "run", lambda _: None):
        compile_it = prepare(case)
        kept.clear()
        started = time.process_time()
        compile_it()
        seconds = time.process_time() - started
    cubin, ptx = max(kept, key=lambda made: len(made[0]))
    pairs = "cta_group::2" in ptx
    if case.kernel.endswith(PAIRS) != pairs:
        raise NotBuilt("two CTAs" if pairs else "one CTA")
    return {"seconds": round(seconds, 2)} | asdict(read_cubin(cubin))


def rows_of(kernel: str, only: str, backward: bool) -> Iterator[dict[str, Any]]:
    """All cases of a kernel in this process, one of them compiled before the first is timed."""
    chosen = [case for case in cases(backward) if case.kernel == kernel and only in case.name]
    with device(ARCH, RoundRobin(), sms=2, seconds=SECONDS):
        if not kernel.startswith("attn4"):
            import flash_attn.cute  # noqa: F401
        for number, case in enumerate([Case(32, 32, True, kernel, backward), *chosen]):
            row = {"case": asdict(case), "name": case.name}
            try:
                row |= compiled(case)
            except Exception as error:  # noqa: BLE001  a row says what became of it
                text = str(error).strip().splitlines() or [""]
                row["status"] = f"{type(error).__name__}: {text[0]}"
            if number:
                yield row


def in_a_process(kernel: str, only: str, backward: bool = False) -> list[dict[str, Any]]:
    """`rows_of` in a process of its own, for the reference reads its environment once."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {} if kernel.endswith(PAIRS) else SINGLE_CTA
    command = [sys.executable, "-W", "ignore", "-m", "reference_kernels.compiled"]
    command += ["--kernel", kernel, "--only", only, *(["--backward"] if backward else [])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference_kernels.compiled", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where to write (default: print the page)")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--kernel", choices=KERNELS, help="one kernel's cases alone, a line of JSON for each")
    parser.add_argument("--backward", action="store_true", help="the kernels of gradients")
    given = parser.parse_args(arguments)
    if given.kernel is not None:
        for row in rows_of(given.kernel, given.only, given.backward):
            print(json.dumps(row), flush=True)
        return 0
    found = [row for kernel in KERNELS for row in in_a_process(kernel, given.only, given.backward)]
    order = [(case.name, case.kernel) for case in cases(given.backward)]
    rows = sorted(found, key=lambda row: order.index((row["name"], row["case"]["kernel"])))
    page = document(rows, given.backward)
    if given.folder is None:
        print(page, end="")
        return 0
    name = "compiled-backward" if given.backward else "compiled-forward"
    (given.folder / f"{name}.md").write_text(page)
    (given.folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
