"""Run one of NVIDIA's examples of CuTe-DSL on the emulator, with its own check of the result.

``python -m cutlass_examples CUTLASS "hopper dense_gemm"``, where CUTLASS is a checkout of NVIDIA/cutlass.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from attn4.emulator.schedule import named
from cutlass_examples.examples import EXAMPLES, FOLDER
from cutlass_examples.program import run_program


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cutlass_examples", description=__doc__)
    parser.add_argument("cutlass", type=Path, help="a checkout of NVIDIA/cutlass")
    parser.add_argument("example", choices=EXAMPLES, metavar="EXAMPLE", help=", ".join(EXAMPLES))
    parser.add_argument("--schedule", default="round_robin", help="see attn4.emulator.schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hazards", action="store_true", help="report races and the like: exit status 1")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    example = EXAMPLES[given.example]
    gpu = run_program(
        given.cutlass / FOLDER / example.path,
        list(example.arguments),
        example.arch,
        named(given.schedule, given.seed),
        hazards=given.hazards,
    )
    print(f"{len(gpu.grids)} launches, {sum(grid.clock for grid in gpu.grids)} instructions")
    for hazard in gpu.hazards:
        print(hazard)
    return int(bool(gpu.hazards))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
