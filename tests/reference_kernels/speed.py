"""How fast the emulator runs kernels, in millions of warp-instructions a second of process time, on one core.

``python -m reference_kernels.speed [NUMBER] [--hazards] [--repeat 5]``: a row of a Markdown table for each
case, or for one of them; each runs in a process of its own, the first run of a kernel not counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from attn4 import flash_attn_func
from attn4.emulator.grid import Grid
from attn4.emulator.schedule import RoundRobin
from reference_kernels.attention import attend, inputs
from reference_kernels.problem import Problem
from reference_kernels.runtime import device

SECONDS = 600


def _square(arch: str, head_dim: int, seqlen: int, **options: bool) -> Problem:
    return Problem(arch=arch, head_dim=head_dim, seqlen_q=seqlen, seqlen_k=seqlen, sms=4, **options)


CASES = {
    "flash-attn-4 sm_100a forward, D 128 causal, S 1024": _square("sm_100a", 128, 1024, causal=True),
    "flash-attn-4 sm_100a forward, D 64 full, S 1024": _square("sm_100a", 64, 1024),
    "flash-attn-4 sm_100a backward, D 128 causal, S 512": _square(
        "sm_100a", 128, 512, causal=True, backward=True
    ),
    "flash-attn-4 sm_90a forward, D 128 causal, S 1024": _square("sm_90a", 128, 1024, causal=True),
    "attn4 sm_90a forward, D 128 causal, S 2048": _square("sm_90a", 128, 2048, causal=True),
}


def measured(problem: Problem, own: bool, repeat: int, hazards: bool) -> dict[str, tuple[int, float]]:
    """Instructions and best seconds of each kernel that a problem launches."""
    seconds: list[float] = []
    run = Grid.run

    def timed(grid: Grid) -> None:
        started = time.process_time()
        run(grid)
        seconds.append(time.process_time() - started)

    given = inputs(problem)
    with device(problem.arch, RoundRobin(), sms=problem.sms, seconds=SECONDS, hazards=hazards) as gpu:
        Grid.run = timed  # type: ignore[method-assign]
        try:
            for _ in range(repeat + 1):
                if own:
                    flash_attn_func(given.q, given.k, given.v, causal=problem.causal, backend="emulator")
                else:
                    attend(problem, given)
        finally:
            Grid.run = run  # type: ignore[method-assign]
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for grid, taken in zip(gpu.grids, seconds, strict=True):
        found[grid.program.kernel.name].append((grid.clock, taken))
    return {name: min(runs[1:], key=lambda entry: entry[1]) for name, runs in found.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference_kernels.speed", description=__doc__)
    parser.add_argument("number", nargs="?", type=int, help="of a case, from 0")
    parser.add_argument("--hazards", action="store_true", help="look for hazards, too")
    parser.add_argument("--repeat", type=int, default=5, help="runs of which the best counts (default 5)")
    given = parser.parse_args(arguments)
    if given.number is None:
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        print("| kernel | instructions | M warp-instructions/s |\n|---|---|---|", flush=True)
        for number in range(len(CASES)):
            command = [sys.executable, "-W", "ignore", "-m", "reference_kernels.speed", str(number)]
            subprocess.run([*command, *arguments], env=environment, check=True)
        return 0
    torch.set_num_threads(1)
    case, problem = list(CASES.items())[given.number]
    found = measured(problem, case.startswith("attn4"), given.repeat, given.hazards)
    # A call launches small kernels beside the one that it is about.
    instructions, taken = max(found.values())
    print(f"| {case} | {instructions // 1000} k | {instructions / taken / 1e6:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
