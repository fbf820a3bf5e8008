"""Run the reference's kernels on the emulator: one problem printed as JSON, or all as a Markdown table.

``python -m reference_kernels "sm_100a forward 128 causal" --schedule random --seed 3``
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from attn4.emulator.schedule import named
from reference_kernels.attention import judged
from reference_kernels.problem import PROBLEMS
from reference_kernels.table import table


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference_kernels", description=__doc__)
    parser.add_argument("problem", nargs="?", metavar="PROBLEM", help="a name in problem.py; without: all")
    parser.add_argument("--schedule", default="round_robin", help="see attn4.emulator.schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hazards", action="store_true", help="look for races and the like")
    given = parser.parse_args(arguments)
    if given.problem is None:
        print("\n".join(table(given.schedule, given.seed)))
        return 0
    if given.problem not in PROBLEMS:
        parser.error(f"no problem is called {given.problem!r}; there are: {', '.join(PROBLEMS)}")
    torch.set_num_threads(1)
    schedule = named(given.schedule, given.seed)
    outcome = judged(PROBLEMS[given.problem], schedule, hazards=given.hazards)
    print(json.dumps(outcome.as_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
