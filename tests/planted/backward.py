"""Every fault that is planted in attn4's backward kernels: in each channel, in what orders accesses, and in
the turns by which deterministic sums are added.

``python -m planted.backward [KERNEL [PART]]`` in ``tests/`` prints how each is found, or those with that in
their names, as Markdown.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from attn4.artifact import artifact_for
from attn4.emulator.grid import Limits
from attn4.emulator.schedule import Random, RoundRobin, Schedule
from attn4.emulator.state.asynchronous import Copy
from attn4.plan.plan import Plan
from emulated.backward_kernel import backward_plan, differentiate, pair_plan
from gradient_judge import incoming
from planted import channels
from planted.blackwell import Fault, first_report, of_counts, of_orders, tabulate
from planted.channels import Ring
from planted.replay import Recording, recorded
from planted.waits import Site, executed
from problem_case import Case


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch; ``sms`` multiprocessors."""

    case: Case
    arch: str
    deterministic: bool = False
    sms: int = 1
    pair: bool = False

    @property
    def plan(self) -> Plan:
        """That of single CTAs, or of pairs."""
        if self.pair:
            return pair_plan(self.case, deterministic=self.deterministic)
        return backward_plan(self.case, self.deterministic, self.arch)


STEPS = Case(name="", batch=1, seqlen_q=500, seqlen_k=100, heads=1, kv_heads=1, head_dim=128)
"""One CTA that takes four steps on Blackwell: a ring of two slots comes round."""

TILES = replace(STEPS, seqlen_q=250, seqlen_k=500, head_dim=64)
"""Four CTAs that add to the same sums, of two blocks of queries."""

CAUSAL = replace(TILES, seqlen_q=500, heads=2, kv_heads=2, causal=True)
"""Four tiles of four to one step a head; the second head is taken in the other order. Of three sums that meet
the first two may change places and the bits stay.
"""

KERNELS = {
    "Blackwell": Kernel(STEPS, "sm_100a"),
    "Blackwell, a pair": Kernel(STEPS, "sm_100a", pair=True, sms=2),
    "Blackwell, wide": Kernel(replace(STEPS, seqlen_q=250, head_dim=256), "sm_100a"),
    "Hopper": Kernel(replace(STEPS, seqlen_q=130, seqlen_k=500), "sm_90a"),
    "Hopper, wide": Kernel(replace(STEPS, seqlen_q=130, seqlen_k=250, head_dim=256), "sm_90a", sms=2),
    "Blackwell, deterministic": Kernel(TILES, "sm_100a", deterministic=True, sms=4),
    "Hopper, deterministic": Kernel(CAUSAL, "sm_90a", deterministic=True, sms=4),
}
"""By name. The second CTA of the pair has no keys. A CTA of Hopper's takes four tiles of three steps, so
that two slots of K come round; the wide one is a cluster that takes two. In deterministic kernels only the
turns are tampered with: the rest is that of the others.
"""

KEEPER = ("granted", "added")
"""Channels of the warp that keeps the turns of deterministic sums on Hopper."""

UNPLANTED = {"added full: arrives early", "granted full: arrives early"}
"""A warp's additions happen in its turn here; said some instructions early, they are there all the same. And
a turn granted before it has come is a lock that is not waited for, or looked at.
"""

GRADIENTS = 1
"""The second of the three launches."""

REDUNDANT = {"Hopper": {("dout", "empty"), ("key", "empty")}}
"""Where slots come back in another way, too, so that only counts matter. A slot of dO is free when that of Q
is, which is waited for before; one of K when the tile after the next is announced.
"""

SEEDS = range(6)

ENDS = (("no first", 0), ("no last", 1))
"""Barriers of all threads of a cluster: before those in shared memory are used, and before a CTA leaves."""

_BARRIER = re.compile(r"(barrier\.cluster\.arrive[^;]*;\s*barrier\.cluster\.wait[^;]*;)")


class Delayed(Random):
    """Bulk copies, sums among them, are on their way for long, and overtake each other."""

    def due(self, copies: list[Copy]) -> int | None:
        """Of other copies any, soon; of these any, in one turn of a thousand."""
        delayed = self._random.random() < 1 / 1000
        chosen = [n for n, copy in enumerate(copies) if copy.label.startswith("a bulk copy") == delayed]
        return self._random.choice(chosen) if chosen else None


@cache
def kernel(name: str) -> tuple[Recording, list[Site], dict[str, Ring]]:
    """The launch, what it executes that orders accesses, and its rings."""
    chosen = KERNELS[name]
    case, inputs = chosen.case, chosen.case.inputs("cpu")
    with recorded() as found:
        differentiate(
            *(case, inputs, incoming(case, inputs), RoundRobin()),
            hazards=False,
            sms=chosen.sms,
            plan=chosen.plan,
        )
    recording = found[GRADIENTS]
    return recording, executed(recording, sms=chosen.sms), channels.rings(_described(name))


def _described(name: str) -> dict:
    return artifact_for(KERNELS[name].plan).description.plan


@cache
def faults(name: str) -> dict[str, Fault]:
    """All faults of a kernel, by name."""
    recording, sites, rings = kernel(name)
    ptx = recording.launch.ptx
    if KERNELS[name].deterministic:
        keeper = {ring: rings[ring] for ring in KEEPER if ring in rings}
        found = [*_of_turns(ptx), *_of_channels(ptx, sites, keeper, set())]
        return {fault.name: fault for fault in found if fault.name not in UNPLANTED}
    redundant = REDUNDANT.get(name, set())
    found = [*_of_channels(ptx, sites, rings, redundant), *of_orders(_described(name), ptx, sites)]
    if any(channel["name"] == "turn" for channel in _described(name)["channels"]):
        found.append(Fault("turn: not waited for", lambda: channels.turn_taken_unasked(ptx)))
        found += [
            Fault(f"turn: {by:+} threads", lambda b=by: channels.turn_count_changed(ptx, b))
            for by in (32, -32)
        ]
    if _described(name)["cluster"] > 1:
        found += [Fault(f"cluster: {which} barrier", lambda n=n: _no_barrier(ptx, n)) for which, n in ENDS]
    return {fault.name: fault for fault in found}


def _no_barrier(ptx: str, number: int) -> str:
    """Without that barrier of the CTAs of a cluster."""
    parts = _BARRIER.split(ptx)
    assert len(parts) == 1 + 2 * len(ENDS)
    parts[2 * number + 1] = "// no barrier"
    return "".join(parts)


def _of_channels(
    ptx: str, sites: list[Site], rings: dict[str, Ring], redundant: set[tuple[str, str]]
) -> Iterator[Fault]:
    for name, side in channels.each(rings):
        ring = rings[name]
        if (name, side) in redundant:
            yield from of_counts(ptx, sites, ring, side)
            continue
        yield Fault(f"{name} {side}: no wait", lambda r=ring, s=side: channels.wait_dropped(ptx, sites, r, s))
        yield from of_counts(ptx, sites, ring, side)
        if name == "dscores" and len(ring.full) > 1:
            # Slots of no other ring lie so that an arrival could be put behind its wait; one arrival less
            # is dS announced early, too.
            continue
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


_WAITED = re.compile(
    r"(ld\.acquire\.gpu\.global\.b32\s+(%r\d+),[^;]*;\s*setp\.\w+\.b32\s+%p\d+, )\2, (%r\d+);"
)
_LOOKED = re.compile(
    r"(ld\.acquire\.gpu\.global\.b32\s+(%r\d+),(?:(?!bra|ld\.acquire).)*?setp\.eq\.b32\s+%p\d+, )"
    r"\2, %r\d+;(?=\s*selp)",
    re.DOTALL,
)
_GIVEN = re.compile(r"(red\.release\.gpu\.global\.add\.s32\s+\[[^\]]*\], )%r\d+;")
_ADDED = re.compile(r"cp\.async\.bulk\.wait_group\s+0;(?=(?:(?!wait_group).)*red\.release)", re.DOTALL)


def _of_turns(ptx: str) -> Iterator[Fault]:
    yield Fault("lock: not waited for", lambda: _changed(_WAITED, r"\g<1>\3, \3;", ptx))
    if _LOOKED.search(ptx):
        yield Fault("lock: next turn said to have come", lambda: _changed(_LOOKED, r"\g<1>\2, \2;", ptx))
    yield Fault("lock: never moved on", lambda: _changed(_GIVEN, "// not moved on", ptx))
    yield Fault("lock: moved on by two", lambda: _changed(_GIVEN, r"\g<1>2;", ptx))
    if _ADDED.search(ptx):
        yield Fault("lock: moved on before sums arrive", lambda: _changed(_ADDED, "// not waited for", ptx))


def _changed(pattern: re.Pattern[str], replacement: str, ptx: str) -> str:
    text, count = pattern.subn(replacement, ptx)
    assert count > 0
    return text


def found_by(name: str, ptx: str) -> tuple[str, list[str]] | None:
    """Under which schedule something is reported first, and what; of deterministic kernels also under which
    the bits are not those that warps in turn give. None if nothing shows.
    """
    recording, _, _ = kernel(name)
    chosen = KERNELS[name]
    report = first_report(recording, ptx, chosen.sms)
    if report is not None:
        return report[0], report[1].kinds
    return differing(name, ptx) if chosen.deterministic else None


def differing(name: str, ptx: str | None = None) -> tuple[str, list[str]] | None:
    """The first schedule under which a kernel, changed or as it is, writes other bits than under another."""
    recording, _, _ = kernel(name)
    orders: dict[str, Schedule] = {"in turn": RoundRobin()}
    for seed in SEEDS:
        orders[f"delayed {seed}"] = Delayed(seed)
        orders[f"random {seed}"] = Random(seed)
    expected = None
    for order, schedule in orders.items():
        limits = Limits(seconds=240, idle_instructions=100_000)
        done = recording.replay(schedule, ptx=ptx, sms=KERNELS[name].sms, limits=limits, hazards=False)
        if done.kinds:
            return order, done.kinds
        expected = expected or done.memory
        if not all(np.array_equal(x, y) for x, y in zip(done.memory, expected, strict=True)):
            return order, ["other bits"]
    return None


def main(arguments: list[str]) -> int:
    """Print the table."""
    return tabulate(arguments, KERNELS, faults, found_by)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
