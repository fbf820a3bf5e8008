"""Flags in memory: what volatile, relaxed, acquire and release accesses and atomics pass on (PTX 8.8).

A release makes the address carry what the lane knows; an acquire of the address learns it. A relaxed access
does the same together with a fence: a store carries what the lane knew at its last fence, and a load is
learned at the next one. Addresses are those of the program, within one cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.clocks import Clocks, Mask, Row

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.hazards.watch import Watch

Lanes = NDArray[Any]


class Flags:
    """Clocks that addresses carry."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def loads(self, warp: Warp, mask: Mask | None, addresses: Lanes, *, acquire: Collection[str]) -> None:
        """A strong load, or the read of an atomic."""
        watched = self._watch.of(warp.block.cluster)
        who = self._watch.who(warp)
        for address, lanes in _each(warp, mask, addresses):
            row: Row | None = watched.shadows.get(("flag", address))
            if row is None:
                continue
            row = watched.clocks.widened(row)
            if acquire:
                watched.clocks.acquire(who, self._watch.lanes(warp, lanes), row)
                continue
            for lane in np.flatnonzero(lanes).tolist():
                key = ("to acquire", lane)
                warp.state[key] = _joined(watched.clocks, warp.state.get(key), row)

    def stores(self, warp: Warp, mask: Mask | None, addresses: Lanes, *, release: Collection[str]) -> None:
        """A strong store, or the write of an atomic."""
        watched = self._watch.of(warp.block.cluster)
        who = self._watch.who(warp)
        for address, lanes in _each(warp, mask, addresses):
            key = ("flag", address)
            if release:
                row = watched.clocks.release(who, self._watch.lanes(warp, lanes))
                watched.shadows[key] = _joined(watched.clocks, watched.shadows.get(key), row)
                continue
            for lane in np.flatnonzero(lanes).tolist():
                fenced = warp.state.get(("fenced", lane))
                if fenced is not None:
                    watched.shadows[key] = _joined(watched.clocks, watched.shadows.get(key), fenced)

    def fence(self, warp: Warp, mask: Mask) -> None:
        """fence.acq_rel, fence.sc: with stores after it a release, with loads before it an acquire."""
        clocks = self._watch.of(warp.block.cluster).clocks
        who = self._watch.who(warp)
        for lane in np.flatnonzero(mask).tolist():
            one = np.arange(who.lanes) == lane
            row = warp.state.pop(("to acquire", lane), None)
            if row is not None:
                clocks.acquire(who, self._watch.lanes(warp, one), clocks.widened(row))
            warp.state["fenced", lane] = clocks.release(who, self._watch.lanes(warp, one))


def _joined(clocks: Clocks, first: Row | None, second: Row) -> Row:
    second = clocks.widened(second)
    if first is None:
        return second.copy()
    joined: Row = np.maximum(clocks.widened(first), second)
    return joined


def _each(warp: Warp, mask: Mask | None, addresses: Lanes) -> Iterator[tuple[int, Mask]]:
    active = np.ones(warp.lanes, np.bool_) if mask is None else mask
    for address in np.unique(addresses[active]).tolist():
        yield address, active & (addresses == address)
