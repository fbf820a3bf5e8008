"""Every fault that is planted in attn4's Blackwell backward: in each channel, and in what orders accesses.

``python -m planted.blackwell_backward [KERNEL [PART]]`` in ``tests/`` prints how each is found, or those with
that in their names, as Markdown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from attn4.artifact import artifact_for
from attn4.emulator.schedule import RoundRobin
from attn4.plan.plan import Plan
from emulated.backward_kernel import backward_plan, differentiate, pair_plan
from gradient_judge import incoming
from planted import channels
from planted.blackwell import Fault, first_report, of_counts, of_orders
from planted.channels import Ring
from planted.replay import Recording, Replay, recorded
from planted.waits import Site, executed
from problem_case import Case

CASE = Case(name="", batch=1, seqlen_q=500, seqlen_k=100, heads=1, kv_heads=1, head_dim=128)
"""One tile of keys, whose second CTA has none, and four steps: a ring of two slots comes round."""

KERNELS: dict[str, Callable[[Case], Plan]] = {"single": backward_plan, "pair": pair_plan}
"""A CTA alone; a pair of CTAs."""

GRADIENTS = 1
"""The second of the three launches."""


def ctas(name: str) -> int:
    """How many CTAs, each on a multiprocessor, the launch of a kernel has."""
    return KERNELS[name](CASE).cta_group


@cache
def kernel(name: str) -> tuple[Recording, list[Site], dict[str, Ring]]:
    """The launch, what it executes that orders accesses, and its rings."""
    inputs = CASE.inputs("cpu")
    given = incoming(CASE, inputs)
    with recorded() as found:
        differentiate(
            CASE, inputs, given, RoundRobin(), hazards=False, sms=ctas(name), plan=KERNELS[name](CASE)
        )
    recording = found[GRADIENTS]
    return recording, executed(recording, sms=ctas(name)), channels.rings(_described(name))


def _described(name: str) -> dict[str, Any]:
    return artifact_for(KERNELS[name](CASE)).description.plan


@cache
def faults(name: str) -> dict[str, Fault]:
    """All faults of a kernel, by name."""
    recording, sites, rings = kernel(name)
    ptx = recording.launch.ptx
    found = (*_of_channels(ptx, sites, rings), *of_orders(_described(name), ptx, sites))
    return {fault.name: fault for fault in found}


def reported(name: str, ptx: str) -> tuple[str, Replay] | None:
    """As `first_report`, of a kernel of this file."""
    return first_report(kernel(name)[0], ptx, ctas(name))


def _of_channels(ptx: str, sites: list[Site], rings: dict[str, Ring]) -> Iterator[Fault]:
    for name, side in channels.each(rings):
        ring = rings[name]
        yield Fault(f"{name} {side}: no wait", lambda r=ring, s=side: channels.wait_dropped(ptx, sites, r, s))
        yield from of_counts(ptx, sites, ring, side)
        yield Fault(f"{name} {side}: arrives early", lambda r=ring, s=side: _early(ptx, sites, r, s))


def _early(ptx: str, sites: list[Site], ring: Ring, side: str) -> str:
    """Who says that a slot is full, or empty, says so too soon."""
    if any(site.kind == "commit" and site.offsets <= ring.barriers(side) for site in sites):
        return channels.products_called_complete(ptx, sites, ring, side)
    if side == "empty" and ring.kind != "mma":
        return channels.given_back_early(ptx, sites, ring)
    if ring.kind == "tma":
        return channels.slot_called_full_before_its_bytes(ptx, sites, ring)
    return channels.arrived_early(ptx, sites, ring, side)


def main(arguments: list[str]) -> int:
    part = arguments.pop() if len(arguments) == 2 else ""
    for name in arguments or KERNELS:
        print(f"## {name}\n\n| fault | schedule | found |\n|---|---|---|")
        for fault in faults(name).values():
            if part not in fault.name:
                continue
            found = reported(name, fault.plant())
            words = "| | NOT FOUND |" if found is None else f"| {found[0]} | {', '.join(found[1].kinds)} |"
            print(f"| {fault.name} {words}", flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
