"""Run attn4's forward on the GPU of this machine, and write what it gives.

    python tests/recorded/record_forward.py --plans > plans.json       # needs no GPU
    attn4 compile --plans plans.json --out BUNDLE                       # where CuTe DSL is
    python3 tests/recorded/record_forward.py OUT --bundle BUNDLE        # on the machine with the GPU

writes OUT/h200_forward.npz.xz (bits of O, and the LSE, about 200 KB) and OUT/h200_forward.json.
"""

from __future__ import annotations

import argparse
import datetime as dt
import io
import json
import lzma
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "src")]

import numpy as np
import torch

from recorded.forward import CASES, inputs


def plans() -> list[dict]:
    """The plans of all problems on Hopper, as JSON."""
    from attn4.artifact import plan_to_json
    from attn4.machine import machine
    from attn4.plan.choose import choose

    chosen = {choose(case.problem(), machine("sm_90a")): None for case in CASES}
    return [plan_to_json(plan) for plan in chosen]


def record(out: Path, bundle: Path | None) -> None:
    """Run every problem twice, and write O and LSE."""
    from attn4.artifact import use_bundle

    if bundle is not None:
        use_bundle(bundle)
    results: dict[str, np.ndarray] = {}
    for case in CASES:
        given = inputs(case, "cuda")
        first, lse = case.run(given, backend="gpu")
        again, _ = case.run(given, backend="gpu")
        assert torch.equal(first, again), case.name
        results[f"{case.name}: out"] = first.view(torch.int16).cpu().numpy()
        results[f"{case.name}: lse"] = lse.cpu().numpy()
    buffer = io.BytesIO()
    np.savez(buffer, **results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "h200_forward.npz.xz").write_bytes(lzma.compress(buffer.getvalue(), preset=9))
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }
    (out / "h200_forward.json").write_text(json.dumps(about, indent=1) + "\n")
    print(about, {name: array.shape for name, array in results.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--plans", action="store_true", help="print the plans as JSON, and do nothing else")
    options = parser.parse_args()
    if options.plans:
        print(json.dumps(plans()))
    elif options.out is None:
        parser.error("where to?")
    else:
        record(options.out, options.bundle)


if __name__ == "__main__":
    main()
