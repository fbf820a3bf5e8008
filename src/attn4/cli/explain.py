"""Print how attn4 solves a problem on a machine, and what bounds its speed. Needs no GPU.

The text shows the roles of the warps, the maps of shared and tensor memory, the channels between roles with
their arrive counts, the tile schedule, and how many cycles a tile keeps each unit busy. With --compiled also
what the compiler made of it: registers, spills, and what each role's loop over keys issues.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING

from attn4.plan.explain import Call, Explanation, explain

if TYPE_CHECKING:
    from attn4.compiled import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``attn4 explain``."""
    parser.add_argument("--arch", default="sm_90a", help="sm_90a, sm_100a, sm_103a, H100, H200, B200 or B300")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="of Q and K (default 128)")
    parser.add_argument("--head-dim-v", type=int, metavar="D", help="of V and the output (default: head dim)")
    parser.add_argument("--heads", type=int, default=16, help="query heads (default 16)")
    parser.add_argument("--kv-heads", type=int, help="key/value heads (default: as many as query heads)")
    parser.add_argument("--batch", type=int, default=4, help="sequences (default 4)")
    parser.add_argument("--seqlen-q", type=int, default=4096, help="queries of a sequence (default 4096)")
    parser.add_argument("--seqlen-k", type=int, help="keys of a sequence (default: as many as queries)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), default="bfloat16")
    parser.add_argument(
        "--causal", action="store_true", help="query i sees keys up to i, aligned bottom right"
    )
    parser.add_argument(
        "--window",
        dest="window_size",
        type=bound,
        nargs=2,
        default=(None, None),
        metavar=("LEFT", "RIGHT"),
        help="inclusive bounds around the diagonal; none or -1: no bound",
    )
    parser.add_argument("--varlen", action="store_true", help="packed sequences with cu_seqlens")
    parser.add_argument(
        "--lengths",
        type=lengths,
        nargs="+",
        default=[],
        metavar="N",
        help="of packed sequences, queries and keys alike, in their order; 63x256 is 63 of 256",
    )
    parser.add_argument("--backward", action="store_true", help="the gradients instead of the output")
    parser.add_argument("--deterministic", action="store_true", help="bit-equal gradients in every run")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--cta-group", type=int, choices=(1, 2), help="CTAs that share a product (default: the plan's)"
    )
    group.add_argument(
        "--two-cta", dest="cta_group", action="store_const", const=2, help="short for --cta-group 2"
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compile the plan (or take it from the cache) and read its code",
    )
    parser.add_argument("--json", action="store_true", help="the same as data")


def run(args: argparse.Namespace) -> int:
    """Print the explanation of the problem in ``args``."""
    call = {field.name: getattr(args, field.name) for field in fields(Call)}
    call["lengths"] = tuple(chain.from_iterable(args.lengths))
    explanation = explain(machine=args.arch, cta_group=args.cta_group, **call)
    report = compiled(explanation) if args.compiled else None
    if args.json:
        data = explanation.to_dict() | ({} if report is None else {"compiled": report.to_dict()})
        print(json.dumps(data, indent=2))
    else:
        print(explanation, *([] if report is None else [report]), sep="\n\n")
    return 0


def compiled(explanation: Explanation) -> Report:
    """The code of the explained plan. Raises ValueError if there is no plan, or no kernel for it."""
    from attn4.artifact import artifact_for
    from attn4.compiled import read

    why_not = explanation.reasons or explanation.obstacles
    if explanation.plan is None or why_not:
        raise ValueError(f"--compiled: there is no kernel to read. {' '.join(why_not)}")
    return read(explanation.plan, artifact_for(explanation.plan))


def lengths(text: str) -> tuple[int, ...]:
    """Equal lengths of packed sequences: one, or a count and x before it."""
    count, _, length = text.rpartition("x")
    return (int(length),) * (int(count) if count else 1)


def bound(text: str) -> int | None:
    """A bound of a window: a number of keys, None for "none"."""
    return None if text.lower() == "none" else int(text)
