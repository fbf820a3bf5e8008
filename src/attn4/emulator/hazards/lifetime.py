"""How long things live: mbarriers from init to inval, the shared memory of a CTA until its exit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.clocks import WARP, Mask
from attn4.emulator.state.memory import SHARED_START, SharedMemory

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.hazards.order import Sync
    from attn4.emulator.hazards.watch import Watch
    from attn4.emulator.ptx.module import Instruction
    from attn4.emulator.state.barrier import Mbarrier

Lanes = NDArray[Any]


class Lifetimes:
    """Uses of what has ended, or of what has not."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._ends = any(
            i.opcode == "mbarrier" and "inval" in i.modifiers for i in watch.grid.program.instructions
        )

    def waited(self, sync: Sync, warp: Warp, mask: Mask) -> None:
        """A wait for an mbarrier is over: it may end when this is known."""
        if self._ends:
            clocks = self._watch.of(warp.block.cluster).clocks
            if sync.waited is None:
                sync.waited = np.zeros(clocks.threads, np.int32)
            who = self._watch.who(warp)
            own = slice(who.first, who.first + who.lanes)
            epochs = np.repeat(clocks.epochs[who.warps], WARP)
            sync.waited[own] = np.where(mask, epochs, sync.waited[own])

    def used_as_data(
        self,
        warp: Warp,
        mask: Mask | None,
        memory: SharedMemory,
        addresses: Lanes,
        nbytes: int,
        i: Instruction,
    ) -> None:
        """A store where an mbarrier is alive: the memory is for operations on it alone (PTX 9.7.13.15.3)."""
        block = warp.block.cluster.blocks[memory.rank]
        if not block.mbarriers:
            return
        lanes = np.arange(len(addresses)) if mask is None else np.flatnonzero(mask)
        offsets = addresses[lanes].astype(np.int64) - (memory.base - SHARED_START)
        low, high = int(offsets.min()), int(offsets.max()) + nbytes
        if high <= min(block.mbarriers) or max(block.mbarriers) + 8 <= low:
            return
        for start, barrier in block.mbarriers.items():
            if start < high and low < start + 8:
                hit = np.flatnonzero((offsets < start + 8) & (offsets + nbytes > start))
                if hit.size:
                    where = self._watch.shared.name(block, start)
                    message = f"{i.name} writes to {where}, where an mbarrier is in use"
                    thread = self._watch.who(warp).first + int(lanes[hit[0]])
                    self._watch.report("barrier", message, warp, thread, i, str(barrier), barrier=where)

    def delivered(self, warp: Warp, barrier: Mbarrier, phase: int, i: Instruction) -> None:
        """A copy that was issued in ``phase`` of a barrier counts its bytes on it now."""
        if barrier.phase > phase:
            message = (
                f"bytes that {i.name} sent in phase {phase} of {barrier} come when that is complete: it was "
                f"told to expect too few"
            )
            self._watch.report("barrier", message, warp, None, i, barrier=barrier.name)

    def alive(self, warp: Warp, lane: int, rank: int, i: Instruction) -> None:
        """Shared memory of a CTA of the cluster is used: the CTA must not have exited."""
        block = warp.block.cluster.blocks[rank]
        if not block.warps:
            message = (
                f"{i.name} uses shared memory of CTA {block.index}, which has exited: no barrier keeps it"
            )
            self._watch.report("exited", message, warp, self._watch.who(warp).first + lane, i)
