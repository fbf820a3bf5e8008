"""Faults planted in the channels of a kernel of attn4, by name: edits of its PTX, placed by its plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from attn4.emulator.state.block import SYSTEM_SHARED_BYTES
from planted.waits import Site, without

WORD = 8
_INIT = re.compile(r"(mbarrier\.init[\w.:]*\s+\[[^\]]*\]\s*,\s*)[^;]*;")
_ADDRESS = re.compile(r"\[(%\w+)(?:\+(\d+))?\]")
_TURN = re.compile(r"\bbar\.sync\s+(%\w+)\s*,\s*(\d+);")

ARRIVE = "{{ .reg .pred one; elect.sync _|one, -1; @one mbarrier.arrive.shared.b64 _, [{base}+{offset}]; }}"


@dataclass(frozen=True, slots=True)
class Ring:
    """The barriers of a channel: shared offsets of its full and its empty ones, and their arrive counts."""

    name: str
    full: frozenset[int]
    empty: frozenset[int]
    counts: dict[str, int]

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
        offsets = [place + WORD * n for n in range(2 * stages)]
        counts = {"full": channel["full_arrivals"], "empty": channel["empty_arrivals"]}
        name = channel["name"]
        found[name] = Ring(name, frozenset(offsets[:stages]), frozenset(offsets[stages:]), counts)
        place += WORD * 2 * stages
    return found


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
    for site in at(sites, "arrive", ring.empty):
        lines[site.line - 1] = "// " + lines[site.line - 1]
    distance = min(ring.empty) - min(ring.full)
    for site in at(sites, "wait", ring.full):
        match = _ADDRESS.search(lines[site.line - 1])
        assert match is not None
        end = next(n for n in range(site.line, len(lines)) if lines[n].strip() == "}")
        offset = int(match[2] or 0) + distance
        lines[end] += " " + ARRIVE.format(base=match[1], offset=offset)
    return "\n".join(lines)


def turn_taken_unasked(ptx: str) -> str:
    """Warpgroups do not wait for their turn."""
    return _TURN.sub("// no turn", ptx)


def turn_count_changed(ptx: str, by: int) -> str:
    """A warpgroup waits for its turn with a barrier of ``by`` threads more than there are."""
    return _TURN.sub(lambda match: f"bar.sync {match[1]}, {int(match[2]) + by};", ptx)


def each(channels: dict[str, Ring]) -> Iterator[tuple[str, str]]:
    """Channels with their sides."""
    return ((name, side) for name in channels for side in ("full", "empty"))
