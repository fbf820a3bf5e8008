"""Every fault that is planted in attn4's Blackwell forward: in each channel, and in what orders accesses.

``python -m planted.blackwell [KERNEL [PART]]`` in ``tests/`` prints how each is found, or those with that in
their names, as Markdown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from attn4.emulator.grid import Limits
from attn4.emulator.schedule import Adversarial, Random, RoundRobin, Schedule
from emulated.forward_kernel import Case, artifact, attend
from planted import channels
from planted.channels import Ring
from planted.replay import Recording, Replay, recorded
from planted.waits import ORDERS, Site, executed

KERNELS = {
    "causal": Case(128, "causal", 300, 300, heads=2, ctas=1, arch="sm_100a"),
    "full": Case(128, "full", 300, 300, heads=2, ctas=1, arch="sm_100a", options=(("cta_group", 1),)),
    "turns": Case(128, "full", 300, 300, heads=2, ctas=1, arch="sm_100a", options=(("softmax_turns", True),)),
    "pair": Case(128, "full", 520, 1100, ctas=2, arch="sm_100a", options=(("cta_group", 2),)),
    "one query tile": Case(256, "causal", 300, 150, ctas=1, arch="sm_100a"),
    "packed": Case(
        128,
        "causal",
        300,
        300,
        lens_q=(260, 0, 70),
        lens_k=(260, 30, 290),
        heads=2,
        kv_heads=1,
        ctas=1,
        arch="sm_100a",
    ),
}
"""By name: a counter deals tiles; they are dealt statically; softmax warpgroups take turns; two CTAs share
products; two slots for scores, the output leaves through the query's storage, and a tile has no keys;
sequences of different lengths. Each CTA has several tiles, and rings come round.
"""

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "late": lambda: Adversarial(1, late=True),
    "at once": lambda: Adversarial(1, late=False),
    "random": lambda: Random(1),
    "in turn": RoundRobin,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """``plant`` gives the text of the faulty kernel."""

    name: str
    plant: Callable[[], str]


@cache
def kernel(name: str) -> tuple[Recording, list[Site], dict[str, Ring]]:
    """The launch, what it executes that orders accesses, and its rings."""
    case = KERNELS[name]
    with recorded() as found:
        attend(case, RoundRobin(), sms=case.ctas)
    rings = channels.of_all_tiles(channels.rings(artifact(case).description.plan))
    return found[-1], executed(found[-1], sms=case.ctas), rings


@cache
def faults(name: str) -> dict[str, Fault]:
    """All faults of a kernel, by name."""
    recording, sites, rings = kernel(name)
    plan, ptx = artifact(KERNELS[name]).description.plan, recording.launch.ptx
    borrowed = any(buffer["name"] == "out" and buffer["borrows"] == "query" for buffer in plan["buffers"])
    found = [*_of_channels(ptx, sites, rings, borrowed), *of_orders(plan, ptx, sites)]
    if any(channel["kind"] == "named" for channel in plan["channels"]):
        found.append(Fault("turn: not waited for", lambda: channels.turn_taken_unasked(ptx)))
        found += [
            Fault(f"turn: {by:+} threads", lambda b=by: channels.turn_count_changed(ptx, b))
            for by in (32, -32)
        ]
    return {fault.name: fault for fault in found}


def _of_channels(ptx: str, sites: list[Site], rings: dict[str, Ring], borrowed: bool) -> Iterator[Fault]:
    for name, side in channels.each(rings):
        ring = rings[name]
        if (name, side) == ("out", "empty") and borrowed:
            # Its next output comes after a query that waited for this one to leave: only counts matter.
            yield from of_counts(ptx, sites, ring, side)
            continue
        yield Fault(f"{name} {side}: no wait", lambda r=ring, s=side: channels.wait_dropped(ptx, sites, r, s))
        yield from of_counts(ptx, sites, ring, side)
        early = f"{name} {side}: arrives early"
        if ring.kind == "thread":
            yield Fault(early, lambda r=ring, s=side: channels.arrived_early(ptx, sites, r, s))
        elif ring.kind == "mma" or (side, name) == ("empty", "key_value"):
            yield Fault(early, lambda r=ring, s=side: channels.products_called_complete(ptx, sites, r, s))
        elif side == "full":
            yield Fault(early, lambda r=ring: channels.slot_called_full_before_its_bytes(ptx, sites, r))
        else:
            # When a query slot is given back the softmax has read the last scores: they are complete.
            yield Fault(early, lambda r=ring: channels.given_back_early(ptx, sites, r))


def of_counts(ptx: str, sites: list[Site], ring: Ring, side: str) -> Iterator[Fault]:
    """A barrier that takes one arrival more, or less, than there are."""
    for by in (1, -1):
        yield Fault(
            f"{ring.name} {side}: {by:+} arrivals",
            lambda b=by: channels.count_changed(ptx, sites, ring, side, b),
        )


def of_orders(plan: dict[str, Any], ptx: str, sites: list[Site]) -> Iterator[Fault]:
    """A role that does without the fences, or the waits without a barrier, of some kind."""
    groups: dict[str, set[int]] = {}
    for role in plan["roles"]:
        warps = range(role["first_warp"], role["first_warp"] + role["warps"])
        groups.setdefault(role["name"].rstrip("01"), set()).update(warps)
    for role, warps in groups.items():
        for kind in ORDERS:
            if any(site.kind == kind and site.warps <= warps for site in sites):
                yield Fault(
                    f"{role}: no {kind}",
                    lambda k=kind, w=frozenset(warps): channels.orders_dropped(ptx, sites, k, w),
                )


def reported(name: str, ptx: str) -> tuple[str, Replay] | None:
    """As `first_report`, of a kernel of this file."""
    return first_report(kernel(name)[0], ptx, KERNELS[name].ctas)


def first_report(recording: Recording, ptx: str, sms: int = 1) -> tuple[str, Replay] | None:
    """Under which schedule something is reported first, on ``sms`` multiprocessors, and what; None if nothing
    is under any.
    """
    for schedule, make in SCHEDULES.items():
        limits = Limits(seconds=60, idle_instructions=100_000)
        done = recording.replay(make(), ptx=ptx, sms=sms, limits=limits, beyond=frozenset())
        if done.kinds:
            return schedule, done
    return None


def tabulate(
    arguments: list[str],
    kernels: Iterable[str],
    faults: Callable[[str], dict[str, Fault]],
    found_by: Callable[[str, str], tuple[str, Sequence[str]] | None],
) -> int:
    """Print how each fault is found, as Markdown: of the kernels in ``arguments``, or of all ``kernels``; of
    one kernel those with the second argument in their names. ``found_by`` a schedule, and what it reports.
    """
    part = arguments.pop() if len(arguments) == 2 else ""
    for name in arguments or kernels:
        print(f"## {name}\n\n| fault | schedule | found |\n|---|---|---|")
        for fault in faults(name).values():
            if part not in fault.name:
                continue
            found = found_by(name, fault.plant())
            words = "| | NOT FOUND |" if found is None else f"| {found[0]} | {', '.join(found[1])} |"
            print(f"| {fault.name} {words}", flush=True)
        print()
    return 0


def found_by(name: str, ptx: str) -> tuple[str, list[str]] | None:
    """Under which schedule a kernel of this file, changed, is reported first, and what."""
    found = reported(name, ptx)
    return None if found is None else (found[0], found[1].kinds)


def main(arguments: list[str]) -> int:
    return tabulate(arguments, KERNELS, faults, found_by)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
