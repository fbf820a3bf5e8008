"""Time cases against other packages, interleaved in one process, and draw the results.

Each backend's result is compared with float64 before it is timed; one that is wrong, fails or does not
import is reported and not timed. Rows go to OUT/rows.jsonl as they come and to OUT/rows.csv at the end.

  attn4 bench                                   the 18 forward cells against every backend that imports
  attn4 bench forward gqa --backends attn4,cudnn,fa3 --bundle bundle
  attn4 bench schedule --backends attn4,attn4-dealt,attn4-linear,attn4-sorted,attn4-sorting
  attn4 bench backward --backends attn4,cudnn   the gradients of those cells (--direction: of other sets)
  attn4 bench both gqa wide --direction both    a forward pass with its backward pass
  attn4 bench host                              microseconds of the host for a call
  attn4 bench quick --backends reference,eager  a trial run that needs no GPU
  attn4 bench --plot OUT/rows.jsonl --out plots

The exit status is 1 if attn4 was wrong or failed on a case, and 2 if the run could not be made.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from attn4.bench import plots, rows, table
from attn4.bench.cases import CASE_SETS, Case, Passes, cases, directed
from attn4.bench.progress import follow

if TYPE_CHECKING:
    from attn4.bench.session import Session

ROWS_FILE = "rows.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``attn4 bench``."""
    sets = ", ".join(CASE_SETS)
    parser.add_argument("cases", nargs="*", metavar="SET", help=f"case sets, of {sets} (default forward)")
    parser.add_argument("--only", metavar="REGEX", help="only cases whose name matches, as in 'd128-causal'")
    parser.add_argument("--backends", metavar="A,B", help="default: every backend for GPUs that imports")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="take attn4's kernels from here first")
    parser.add_argument("--direction", choices=get_args(Passes), help="time this of the cases of all sets")
    parser.add_argument(
        "--seconds-per-cell",
        type=float,
        default=1.5,
        metavar="S",
        help="device time for all backends of a case together (default 1.5)",
    )
    parser.add_argument(
        "--turn-us",
        type=float,
        default=500.0,
        metavar="US",
        help="a backend runs about so long before the next has its turn (default 500)",
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder (default bench-out)")
    parser.add_argument("--plot", type=Path, metavar="ROWS", help="time nothing, draw these rows into OUT")
    parser.add_argument("--list", action="store_true", help="time nothing, list the cases and the backends")


def run(args: argparse.Namespace) -> int:
    """Run the command; ``ValueError`` and ``NotImplementedError`` for what cannot be run."""
    if args.plot is not None:
        return _plot(args.plot, args.out)
    chosen = _cases(args)
    if args.list:
        return _list(chosen)
    session = _session(args)
    done: list[rows.Row] = []
    try:
        for cell in follow(session.run(chosen), chosen):
            rows.append(cell, args.out / ROWS_FILE)
            done += cell
    finally:
        # An interrupted run has its figures shown too.
        if done:
            rows.write_csv(rows.read(args.out / ROWS_FILE), args.out / "rows.csv")
            print(table.render(done))
    return int(any(row.backend == table.OWN and row.status in {"wrong", "failed"} for row in done))


def _plot(file: Path, out: Path) -> int:
    if not file.is_file():
        raise ValueError(f"--plot needs a file of rows, and {file} is not one")
    try:
        drawn = plots.draw(rows.read(file), out)
    except ModuleNotFoundError as error:
        raise ValueError(f"drawing needs matplotlib (pip install 'attn4[bench]'): {error}") from error
    for path in drawn:
        print(path)
    return 0


def _cases(args: argparse.Namespace) -> list[Case]:
    chosen = [case for name in dict.fromkeys(args.cases or ("forward",)) for case in cases(name)]
    if args.direction is not None:
        chosen = list(dict.fromkeys(directed(case, args.direction) for case in chosen))
    if args.only is not None:
        try:
            pattern = re.compile(args.only)
        except re.error as error:
            raise ValueError(f"--only {args.only!r} is not a regular expression: {error}") from error
        chosen = [case for case in chosen if pattern.search(case.name)]
    if not chosen:
        raise ValueError(f"no case is called like {args.only!r}; `attn4 bench SET --list` shows the names")
    return chosen


def _list(chosen: Sequence[Case]) -> int:
    from attn4.bench.peers import PEERS

    print("\n".join(case.name for case in chosen))
    print("backends:", ", ".join(peer.name for peer in PEERS))
    return 0


def _session(args: argparse.Namespace) -> Session:
    import torch

    from attn4.bench import peers, telemetry
    from attn4.bench.session import Session
    from attn4.bench.timing import Budget

    if args.seconds_per_cell <= 0 or args.turn_us <= 0:
        raise ValueError("--seconds-per-cell and --turn-us must be greater than 0")
    names = None if args.backends is None else tuple(name.strip() for name in args.backends.split(","))
    chosen = peers.select(names)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not any("cpu" in peer.devices for peer in chosen):
        raise ValueError(
            "needs an NVIDIA GPU with a CUDA build of torch, and torch finds none here. "
            "For a trial run on the CPU: attn4 bench quick --backends reference,eager"
        )
    if args.bundle is not None:
        from attn4.artifact import use_bundle

        use_bundle(args.bundle)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    setting = telemetry.setting(device, _command(args))
    return Session.open(chosen, setting, device, Budget(seconds=args.seconds_per_cell, turn_us=args.turn_us))


def _command(args: argparse.Namespace) -> str:
    """The command without what leaves figures alone: where rows go, and in which folder the bundle is."""
    words = ["attn4", "bench", *args.cases]
    words += ["--only", args.only] if args.only else []
    words += ["--direction", args.direction] if args.direction else []
    words += ["--backends", args.backends] if args.backends else []
    words += ["--bundle", args.bundle.name] if args.bundle else []
    words += ["--seconds-per-cell", f"{args.seconds_per_cell:g}", "--turn-us", f"{args.turn_us:g}"]
    return shlex.join(words)
