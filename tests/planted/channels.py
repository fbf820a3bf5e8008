"""Faults planted in the channels of a kernel of attn4, by name: edits of its PTX, placed by its plan.

Lines are never added, so that sites stay where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from attn4.emulator.state.block import SYSTEM_SHARED_BYTES
from planted.waits import Site, without

WORD = 8
SIDES = ("full", "empty")
_INIT = re.compile(r"(mbarrier\.init[\w.:]*\s+\[[^\]]*\]\s*,\s*)[^;]*;")
_ADDRESS = re.compile(r"\[(%\w+)(?:\+(\d+))?\]")
_TURN = re.compile(r"\bbar\.sync\s+(%\w+)\s*,\s*(\d+);")

_ARRIVE = "mbarrier.arrive.shared.b64 _, [{base}+{offset}]; "
_ARRIVE_AT = (
    "add.u32 barrier, {base}, {offset}; mapa.shared::cluster.u32 barrier, barrier, {rank}; "
    "mbarrier.arrive.shared::cluster.b64 _, [barrier]; "
)


@dataclass(frozen=True, slots=True)
class Ring:
    """The barriers of a channel, or of those of all query tiles: shared offsets of the full and the empty
    ones, if there are any, their arrive counts, and who says full ("tma", "thread" or "mma").
    """

    name: str
    full: frozenset[int]
    empty: frozenset[int]
    counts: dict[str, int]
    kind: str

    def barriers(self, side: str) -> frozenset[int]:
        """The barriers of the side "full" or "empty"."""
        return self.full if side == "full" else self.empty


def rings(plan: dict[str, Any]) -> dict[str, Ring]:
    """The rings of a plan (as an artefact describes it), which lie one behind the other in ``barriers``."""
    (buffer,) = (buffer for buffer in plan["buffers"] if buffer["name"] == "barriers")
    place = SYSTEM_SHARED_BYTES + buffer["offset"]
    found = {}
    for channel in plan["channels"]:
        if channel["kind"] == "named":
            continue
        stages = channel["stages"]
        barriers = stages * (1 + (channel["empty_arrivals"] > 0))
        offsets = [place + WORD * n for n in range(barriers)]
        counts = {"full": channel["full_arrivals"], "empty": channel["empty_arrivals"]}
        name = channel["name"]
        full, empty = frozenset(offsets[:stages]), frozenset(offsets[stages:])
        found[name] = Ring(name, full, empty, counts, channel["kind"])
        place += WORD * barriers
    return found


def of_all_tiles(found: dict[str, Ring]) -> dict[str, Ring]:
    """The rings of a plan, those of query tiles 0 and 1 as one: both are served by the same text."""
    merged: dict[str, Ring] = {}
    for name, ring in found.items():
        family = re.sub(r"\d", "", name)
        other = merged.get(family)
        if other is not None:
            ring = replace(ring, full=ring.full | other.full, empty=ring.empty | other.empty)
        merged[family] = replace(ring, name=family)
    return merged


def _arrival(line: str, base: str, offset: int) -> str:
    """PTX by which a lane arrives at the barrier at ``base`` + ``offset``: in the CTAs of a pair in which
    ``line``, an arrival or a commit, does.
    """
    ranks = (0, 1) if "multicast" in line else (0,) if "mbarrier.arrive.shared::cluster" in line else ()
    arrivals = "".join(_ARRIVE_AT.format(base=base, offset=offset, rank=rank) for rank in ranks)
    arrivals = arrivals or _ARRIVE.format(base=base, offset=offset)
    return f"{{ .reg .b32 barrier; {arrivals}}}"


def _by_one_lane(arrival: str) -> str:
    return f"{{ .reg .pred one; elect.sync _|one, -1; @!one bra SKIP; {arrival} SKIP: }}"


def at(sites: Iterable[Site], kind: str, barriers: frozenset[int]) -> list[Site]:
    """The sites of that kind that concern these barriers. Raises LookupError if there is none."""
    found = [site for site in sites if site.kind == kind and site.offsets <= barriers]
    if not found:
        raise LookupError(f"no {kind} was executed on barriers at {sorted(barriers)}")
    return found


def wait_dropped(ptx: str, sites: Iterable[Site], ring: Ring, side: str) -> str:
    """No one waits for the barriers of that side."""
    for site in at(sites, "wait", ring.barriers(side)):
        ptx = without(ptx, site.line)
    return ptx


def count_changed(ptx: str, sites: Iterable[Site], ring: Ring, side: str, by: int) -> str:
    """The barriers of that side take ``by`` arrivals more a phase than there are."""
    lines = ptx.split("\n")
    for site in at(sites, "init", ring.barriers(side)):
        lines[site.line - 1] = _INIT.sub(rf"\g<1>{ring.counts[side] + by};", lines[site.line - 1])
    return "\n".join(lines)


def given_back_early(ptx: str, sites: Iterable[Site], ring: Ring) -> str:
    """Each consumer gives a slot back as soon as it is full, before it has read it."""
    sites = list(sites)
    lines = ptx.split("\n")
    given_back = [site for site in sites if site.kind in ("arrive", "commit") and site.offsets <= ring.empty]
    given = lines[given_back[0].line - 1]
    for site in given_back:
        lines[site.line - 1] = "// " + lines[site.line - 1]
    distance = min(ring.empty) - min(ring.full)
    for site in at(sites, "wait", ring.full):
        match = _ADDRESS.search(lines[site.line - 1])
        assert match is not None
        end = next(n for n in range(site.line, len(lines)) if lines[n].strip() == "}")
        offset = int(match[2] or 0) + distance
        lines[end] += " " + _by_one_lane(_arrival(given, match[1], offset))
    return "\n".join(lines)


def slot_called_full_before_its_bytes(ptx: str, sites: Iterable[Site], ring: Ring) -> str:
    """The producer announces no bytes: its arrival alone completes the full barrier."""
    lines = ptx.split("\n")
    for site in at(sites, "arrive", ring.full):
        line = lines[site.line - 1]
        if "expect_tx" in line:
            lines[site.line - 1] = re.sub(r"\.expect_tx|(?<=\]), %\w+(?=;)", "", line)
    return "\n".join(lines)


def products_called_complete(ptx: str, sites: Iterable[Site], ring: Ring, side: str) -> str:
    """The thread that issues products says at once that they are complete."""
    lines = ptx.split("\n")
    for site in at(sites, "commit", ring.barriers(side)):
        line = lines[site.line - 1]
        address = _ADDRESS.search(line)
        assert address is not None
        lines[site.line - 1] = _arrival(line, address[1], int(address[2] or 0))
    return "\n".join(lines)


def arrived_early(ptx: str, sites: Iterable[Site], ring: Ring, side: str) -> str:
    """Who arrives does so as soon as a wait before it in the text is over, and not when it is done.

    It is the last of the waits for barriers that lie to each other as those that it arrives at.
    """
    sites = list(sites)
    lines = ptx.split("\n")
    waits = [site for site in sites if site.kind == "wait"]
    for site in at(sites, "arrive", ring.barriers(side)):
        before = [
            wait
            for wait in waits
            if wait.line < site.line and site.warps <= wait.warps and _spread(wait) == _spread(site)
        ]
        address = _ADDRESS.search(lines[before[-1].line - 1])
        assert address is not None
        line = lines[site.line - 1]
        lines[site.line - 1] = "// " + line
        end = next(n for n in range(before[-1].line, len(lines)) if lines[n].strip() == "}")
        offset = int(address[2] or 0) + min(site.offsets) - min(before[-1].offsets)
        lines[end] += " " + _by_one_lane(_arrival(line, address[1], offset))
    return "\n".join(lines)


def _spread(site: Site) -> tuple[int, ...]:
    """How the barriers of a site lie to each other: by query tile, or by slot."""
    return tuple(offset - min(site.offsets) for offset in sorted(site.offsets))


def orders_dropped(ptx: str, sites: Iterable[Site], kind: str, warps: frozenset[int]) -> str:
    """These warps do without the fences, or the waits without a barrier, of that kind."""
    lines = ptx.split("\n")
    chosen = [site for site in sites if site.kind == kind and site.warps <= warps]
    if not chosen:
        raise LookupError(f"no {kind} was executed by warps {sorted(warps)}")
    for site in chosen:
        lines[site.line - 1] = "// " + lines[site.line - 1]
    return "\n".join(lines)


def turn_taken_unasked(ptx: str) -> str:
    """Warpgroups do not wait for their turn."""
    return _TURN.sub("// no turn", ptx)


def turn_count_changed(ptx: str, by: int) -> str:
    """A warpgroup waits for its turn with a barrier of ``by`` threads more than there are."""
    return _TURN.sub(lambda match: f"bar.sync {match[1]}, {int(match[2]) + by};", ptx)


def each(channels: dict[str, Ring]) -> Iterator[tuple[str, str]]:
    """Channels with their sides."""
    return ((name, side) for name, ring in channels.items() for side in SIDES if ring.barriers(side))
