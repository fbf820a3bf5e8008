"""Run a Python program whose CuTe-DSL kernels run on an emulated GPU, and print what they did.

  python -m attn4.emulator --arch sm_100a SCRIPT ARGUMENTS...

The program finds one device; tensors on it are CPU tensors. The exit status is the program's own, and 1 on a
hazard.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attn4.emulator import device
from attn4.emulator.launch.device import Chip

FAILED, USAGE = 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attn4.emulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arch", default="sm_100a", help="sm_90a, sm_100a or sm_103a (default sm_100a)")
    add("--schedule", choices=("round_robin", "random", "adversarial", "eager"), default="round_robin")
    add("--seed", type=int, default=0, help="of the schedule (default 0)")
    add("--sms", type=int, default=4, help="multiprocessors of the device (default 4)")
    add("--hazards", action="store_true", help="look for races and the like, at a third of the speed")
    add("--json", action="store_true", help="the report as data, on the last line")
    add("script", help="a Python file, run as __main__")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the program that ``words`` name; returns the exit status."""
    args = _parser().parse_args(words)
    try:
        Chip.of(args.arch, args.sms)
        if not Path(args.script).is_file():
            raise ValueError(f"{args.script} is no file")
    except ValueError as error:
        print(error, file=sys.stderr)
        return USAGE
    options = {"seed": args.seed, "hazards": args.hazards, "sms": args.sms}
    with _script(args.script, args.arguments), device(args.arch, schedule=args.schedule, **options) as gpu:
        status = _run(args.script)
    if args.json:
        hazards = [hazard.as_dict() for hazard in gpu.hazards]
        print(json.dumps({"hazards": hazards, "counts": gpu.report.to_dict()}))
    else:
        print(gpu.report, *gpu.hazards, sep="\n")
    return status or (FAILED if gpu.hazards else 0)


@contextmanager
def _script(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """What a program finds that is started from the shell."""
    kept = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = kept


def _run(path: str) -> int:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, int):
            return ended.code
        return FAILED if ended.code else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
