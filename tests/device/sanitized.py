"""Small launches of every kind of kernel, for compute-sanitizer; prints one line when all have run.

    compute-sanitizer --tool memcheck python tests/device/sanitized.py bundle
    compute-sanitizer --tool racecheck python tests/device/sanitized.py bundle
    compute-sanitizer --tool synccheck python tests/device/sanitized.py bundle

Without a bundle kernels are compiled; ``--cases 3`` runs the first three. No oracle runs here: the tests
compare numbers, this looks for bad accesses and missing synchronisation.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from attn4.artifact import use_bundle
from cases import ORDERED, case

NAMES = (
    "dim 64 full",
    "dim 64 causal",
    "dim 96 full",
    "dim 128 causal",
    "dim 200 full",
    "dim 256 causal",
    "dim 192,128 window",
    "full 128 261x261",
    "causal 128 300x40",
    "float16 128 causal",
    "used queries and keys",
    "heads 8:2 full 1",
    "heads 8:1 causal 5",
    "packed cross 128 causal",
    "packed and used",
)
"""Cases of the list; each is differentiated too, and some deterministically."""


def main(bundle: str | None, count: int) -> None:
    """Run every case twice, so that counters and caches are used a second time."""
    with nullcontext() if bundle is None else use_bundle(bundle):
        for name in NAMES[:count]:
            chosen = case(name)
            inputs = chosen.inputs("cuda")
            for deterministic in (False, name in ORDERED):
                leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
                chosen.run(inputs)
                result = chosen.run(inputs.with_tensors(*leaves), deterministic=deterministic)
                torch.autograd.grad([x.sum() for x in result], leaves)
    torch.cuda.synchronize()
    print(f"{min(count, len(NAMES))} cases ran")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", nargs="?")
    parser.add_argument("--cases", type=int, default=len(NAMES))
    arguments = parser.parse_args()
    main(arguments.bundle, arguments.cases)
