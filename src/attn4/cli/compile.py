"""Compile kernels ahead of time into a bundle, a folder that serves machines without CuTe DSL. Needs no GPU.

Every combination of the options given is compiled; what the folder holds already is skipped. Lengths,
strides, the batch and the number of heads are no options: one kernel serves them all. Let a process look
into the bundle with attn4.artifact.use_bundle(FOLDER).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, TextIO

from attn4.artifact import build_bundle, plan_from_json
from attn4.artifact.bundle import Progress
from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose, runnable
from attn4.plan.plan import Plan
from attn4.plan.sorting import sorting_plan, with_sorted_batches
from attn4.problem import Problem

MASKS = {"full": Mask(), "causal": Mask.of(causal=True), "window": Mask(1024, 0)}
"""A mask of each kind; the bounds of a window come with a call."""

CHOICES = {"no": (False,), "yes": (True,), "both": (False, True)}

_KV_HEADS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``attn4 compile``."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="the bundle; made if missing"
    )
    parser.add_argument("--arch", nargs="+", default=["sm_90a"], help="sm_90a, H100, H200 (default sm_90a)")
    parser.add_argument(
        "--head-dim",
        nargs="+",
        type=_head_dims,
        default=[(64, 64), (128, 128)],
        metavar="D[,DV]",
        help="of Q and K, and of V if it differs (default 64 128)",
    )
    parser.add_argument("--mask", nargs="+", choices=MASKS, default=["full", "causal"])
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float16"), default=["bfloat16"])
    parser.add_argument(
        "--group", nargs="+", type=int, default=[1], metavar="G", help="query heads per key/value head"
    )
    parser.add_argument(
        "--seqlen-q", nargs="+", type=int, default=[4096], metavar="S", help="queries, where a plan asks"
    )
    _add_choice(parser, "--varlen", "no", "packed sequences with cu_seqlens")
    _add_choice(parser, "--seqused", "no", "a used length of each sequence of keys")
    _add_choice(
        parser, "--sorted", "no", "what scheduler_metadata needs: sorted batches, and the kernel that sorts"
    )
    _add_choice(parser, "--lse", "yes", "return the log-sum-exp")
    parser.add_argument("--no-lse", dest="lse", action="store_const", const="no", help="short for --lse no")
    parser.add_argument("--jobs", type=int, metavar="N", help="compiles at a time (default: one a core)")
    parser.add_argument(
        "--plans", type=Path, metavar="FILE", help="compile this JSON list of plans, not the combinations"
    )


def run(args: argparse.Namespace) -> int:
    """Build the bundle; the status is 1 if a kernel did not compile."""
    plans = read_plans(args.plans) if args.plans is not None else list(plans_of(args))
    started = time.monotonic()
    with _display(sys.stderr) as show:
        report = build_bundle(plans, args.out, args.jobs, progress=show)
    for plan, reason in report.failed:
        print(f"failed: {describe(plan)}\n{reason.rstrip()}", file=sys.stderr)
    artifacts = report.built + report.skipped
    size = sum(artifact.library.stat().st_size for artifact in artifacts)
    print(
        f"{report.folder}: {len(report.built)} built, {len(report.skipped)} there already, "
        f"{len(report.failed)} failed; {size / 1000:.0f} kB of code, {time.monotonic() - started:.1f} s"
    )
    return 1 if report.failed else 0


def plans_of(args: argparse.Namespace) -> Iterator[Plan]:
    """The plan of every combination in ``args``. Raises ValueError with all reasons if one has no kernel."""
    problems = [
        (machine(arch), _problem(dims, mask, dtype, flags, group, seqlen_q))
        for arch, dims, mask, dtype, *flags, group, seqlen_q in product(
            args.arch,
            args.head_dim,
            args.mask,
            args.dtype,
            CHOICES[args.varlen],
            CHOICES[args.seqused],
            CHOICES[args.lse],
            args.group,
            args.seqlen_q,
        )
    ]
    reasons = dict.fromkeys(reason for target, problem in problems for reason in runnable(problem, target))
    if reasons:
        raise ValueError(" ".join(reasons))
    chosen = (choose(problem, target) for target, problem in problems)
    return (each for plan in chosen for each in _with_sorted(plan, CHOICES[args.sorted]))


def _with_sorted(plan: Plan, choices: tuple[bool, ...]) -> Iterator[Plan]:
    """``plan`` as it is, for sorted batches, or both; a batch of equal sequences has nothing to sort."""
    ragged = any((plan.cu_seqlens_q, plan.cu_seqlens_k, plan.seqused_q, plan.seqused_k))
    for wanted in choices:
        if wanted and ragged:
            yield with_sorted_batches(plan)
            yield sorting_plan(plan)
        else:
            yield plan


def read_plans(path: Path) -> list[Plan]:
    """Plans from a JSON list of objects, each like ``plan`` in an ``artifact.json``."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path} must hold a list of plans.")
    return [plan_from_json(entry) for entry in entries]


def describe(plan: Plan) -> str:
    """A plan in a few words."""
    dims = f"{plan.head_dim}" if plan.head_dim == plan.head_dim_v else f"{plan.head_dim},{plan.head_dim_v}"
    words = [plan.arch, plan.direction, plan.dtype, f"head_dim {dims}", plan.mask]
    if plan.kernel == "sort_batches":
        words = [plan.arch, "sorts batches for tiles of", f"{plan.tile_m} x {plan.tile_n}", plan.mask]
    flags = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "lse", "deterministic")
    words += [flag for flag in flags if getattr(plan, flag)]
    if plan.schedule.sorted_batches:
        words.append("sorted batches")
    if plan.pack_gqa > 1:
        words.append(f"packs {plan.pack_gqa} heads")
    return " ".join(words)


@contextmanager
def _display(out: TextIO) -> Iterator[Callable[[Progress], None]]:
    """What shows progress on ``out``: a line a kernel, and a bar if it is a terminal and rich is there."""
    if not (out.isatty() and importlib.util.find_spec("rich") is not None):
        yield lambda event: print(f"[{event.done}/{event.total}] {_line(event)}", file=out, flush=True)
        return
    console: Any = importlib.import_module("rich.console").Console(file=out)
    bar: Any = importlib.import_module("rich.progress").Progress(console=console)
    with bar:
        task = bar.add_task("compiling", total=None)

        def show(event: Progress) -> None:
            console.print(_line(event), highlight=False, markup=False)
            bar.update(task, completed=event.done, total=event.total)

        yield show


def _line(event: Progress) -> str:
    if event.artifact is None:
        return f"failed   {describe(event.plan)}"
    if not event.built:
        return f"there    {describe(event.plan)}"
    kernel = next(iter(event.artifact.description.kernels), None)
    cost = f", {kernel.registers} registers, {kernel.stack_bytes} B of stack" if kernel else ""
    return f"{sum(event.artifact.description.seconds.values()):5.1f} s  {describe(event.plan)}{cost}"


def _problem(
    dims: tuple[int, int], mask: str, dtype: Any, flags: list[bool], group: int, seqlen_q: int
) -> Problem:
    varlen, seqused, lse = flags
    return Problem(
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q,
        heads=group * _KV_HEADS,
        kv_heads=_KV_HEADS,
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=dtype,
        mask=MASKS[mask],
        cu_seqlens_q=varlen,
        cu_seqlens_k=varlen,
        seqused_k=seqused,
        lse=lse,
    )


def _add_choice(parser: argparse.ArgumentParser, name: str, default: str, text: str) -> None:
    parser.add_argument(
        name, nargs="?", const="yes", default=default, choices=CHOICES, help=f"{text} (default {default})"
    )


def _head_dims(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    return int(first), int(second or first)
