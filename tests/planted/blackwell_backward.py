"""Every fault that is planted in attn4's Blackwell backward: in each channel, and in what orders accesses.

``python -m planted.blackwell_backward`` in ``tests/`` prints how each is found, as Markdown.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from attn4.artifact import artifact_for
from attn4.emulator.schedule import RoundRobin
from emulated.backward_kernel import backward_plan, differentiate
from gradient_judge import incoming
from planted import channels
from planted.blackwell import Fault, first_report, of_counts, of_orders
from planted.channels import Ring
from planted.replay import Recording, recorded
from planted.waits import Site, executed
from problem_case import Case

CASE = Case(name="", batch=1, seqlen_q=500, seqlen_k=100, heads=1, kv_heads=1, head_dim=128)
"""One CTA that takes four steps: a ring of two slots comes round."""

GRADIENTS = 1
"""The second of the three launches."""


@cache
def kernel() -> tuple[Recording, list[Site], dict[str, Ring]]:
    """The launch, what it executes that orders accesses, and its rings."""
    inputs = CASE.inputs("cpu")
    with recorded() as found:
        differentiate(CASE, inputs, incoming(CASE, inputs), RoundRobin(), hazards=False, sms=1)
    recording = found[GRADIENTS]
    return recording, executed(recording, sms=1), channels.rings(_described())


def _described() -> dict:
    return artifact_for(backward_plan(CASE)).description.plan


@cache
def faults() -> dict[str, Fault]:
    """All faults, by name."""
    recording, sites, rings = kernel()
    ptx = recording.launch.ptx
    found = (*_of_channels(ptx, sites, rings), *of_orders(_described(), ptx, sites))
    return {fault.name: fault for fault in found}


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


def main() -> None:
    """Print the table."""
    print("| fault | schedule | found |\n|---|---|---|")
    for fault in faults().values():
        found = first_report(kernel()[0], fault.plant())
        words = "| | NOT FOUND |" if found is None else f"| {found[0]} | {', '.join(found[1].kinds)} |"
        print(f"| {fault.name} {words}", flush=True)


if __name__ == "__main__":
    main()
