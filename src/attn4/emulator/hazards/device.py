"""Global memory between the proxies: what threads and bulk copies of one cluster do to the same bytes.

Kept is who wrote each 16-byte chunk last. Checked are a copy after a thread's write, which needs a proxy
fence, and a thread or a load after a copy's write, which must be known to be complete. What threads do to
each other, and what other clusters did, is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.faults import EmulationError
from attn4.emulator.hazards.clocks import DEVICE, ORDERED, WARP, Mask
from attn4.emulator.hazards.shadow import NUMBER, STAMP
from attn4.emulator.state.memory import ByteMemory, GlobalMemory
from attn4.emulator.units.bulk import covered_chunks

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.hazards.watch import Watch
    from attn4.emulator.ptx.module import Instruction
    from attn4.emulator.units.tensormap import TensorMap

Lanes = NDArray[Any]
Chunks = NDArray[np.int64]

CHUNK = 16


@dataclass(slots=True, eq=False)
class _Shadow:
    """Last writers of an allocation's chunks: the cluster, its column, the stamp."""

    allocation: ByteMemory
    clusters: NDArray[np.int32]
    writers: NDArray[np.int32]
    written: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Threads:
    """The chunk of each active lane's access."""

    shadow: _Shadow
    lanes: NDArray[np.int64]
    chunks: Chunks


class DeviceAccesses:
    """Reads and writes of global memory."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._shadows: dict[int, _Shadow] = {}
        self._clusters: dict[tuple[int, ...], int] = {}
        self._copies = any("bulk" in i.modifiers for i in watch.grid.program.instructions if i.opcode == "cp")

    def load(
        self,
        warp: Warp,
        mask: Mask | None,
        memory: GlobalMemory,
        addresses: Lanes,
        nbytes: int,
        i: Instruction,
    ) -> None:
        """A load by the lanes of ``mask`` (None: all) of ``nbytes`` each."""
        if self._shadows:
            access = self._threads(mask, memory, addresses, nbytes, writes=False)
            if access is not None:
                self._after_copies(warp, access, i, "reads")

    def store(
        self,
        warp: Warp,
        mask: Mask | None,
        memory: GlobalMemory,
        addresses: Lanes,
        nbytes: int,
        i: Instruction,
    ) -> None:
        """A store by the lanes of ``mask`` (None: all) of ``nbytes`` each."""
        access = self._threads(mask, memory, addresses, nbytes, writes=True) if self._copies else None
        if access is None:
            return
        self._after_copies(warp, access, i, "writes")
        shadow, chunks = access.shadow, access.chunks
        threads = self._watch.who(warp).first + access.lanes
        epochs = self._watch.of(warp.block.cluster).clocks.epochs[threads // WARP].astype(np.int64)
        shadow.clusters[chunks] = self._cluster(warp)
        shadow.writers[chunks] = threads
        shadow.written[chunks] = epochs << STAMP | self._watch.number(i)

    def reads_tile(
        self, warp: Warp, lane: int, tensor: TensorMap, at: tuple[int, ...], i: Instruction
    ) -> None:
        """A tensor load of a box, issued by ``lane``."""
        if self._shadows:
            found = covered_chunks(tensor, warp.block.grid.memory, at)
            if found is not None and id(found[0]) in self._shadows:
                self._copy(warp, lane, self._shadow(found[0]), found[1], i, "reads")

    def writes_tile(
        self, warp: Warp, lane: int, tensor: TensorMap, at: tuple[int, ...], i: Instruction
    ) -> None:
        """A tensor store or reduction of a box, issued by ``lane``."""
        found = covered_chunks(tensor, warp.block.grid.memory, at)
        if found is not None:
            self._copy_writes(warp, lane, found[0], found[1], i)

    def span(self, warp: Warp, lane: int, ends: tuple[int, int], nbytes: int, i: Instruction) -> None:
        """A bulk copy between two spans, ``ends``: source and target."""
        memory = warp.block.grid.memory
        for address, writes in zip(ends, (False, True), strict=True):
            if not memory.holds(address) or (not writes and not self._shadows):
                continue
            allocation = memory.find(address, nbytes)
            first = (address - allocation.base) // CHUNK
            chunks = np.arange(first, first + -(-nbytes // CHUNK))
            if writes:
                self._copy_writes(warp, lane, allocation, chunks, i)
            else:
                self._copy(warp, lane, self._shadow(allocation), chunks, i, "reads")

    def _threads(
        self, mask: Mask | None, memory: GlobalMemory, addresses: Lanes, nbytes: int, *, writes: bool
    ) -> _Threads | None:
        """Accesses of lanes, None if they need no look or lie in several allocations."""
        lanes = np.arange(len(addresses)) if mask is None else np.flatnonzero(mask)
        places = addresses[lanes].astype(np.int64)
        low, high = int(places.min()), int(places.max())
        try:
            allocation = memory.find(low, high - low + nbytes)
        except EmulationError:
            return None
        if not writes and id(allocation) not in self._shadows:
            return None
        return _Threads(self._shadow(allocation), lanes, (places - allocation.base) // CHUNK)

    def _after_copies(self, warp: Warp, access: _Threads, i: Instruction, does: str) -> None:
        """What copies of the cluster wrote must be known to be complete."""
        shadow, chunks = access.shadow, access.chunks
        clocks = self._watch.of(warp.block.cluster).clocks
        who = self._watch.who(warp)
        columns, stamps = shadow.writers[chunks], shadow.written[chunks]
        by_copies = (columns >= clocks.threads) & (shadow.clusters[chunks] == self._cluster(warp))
        if not by_copies.any():
            return
        late = by_copies & (clocks.common(who, ORDERED)[np.where(by_copies, columns, 0)] < stamps >> STAMP)
        for n in np.flatnonzero(late).tolist():
            thread = who.first + int(access.lanes[n])
            if clocks.row(thread)[ORDERED, columns[n]] < stamps[n] >> STAMP:
                self._tell(warp, thread, shadow, int(chunks[n]), i, does, ordered=False)
                return

    def _copy_writes(
        self, warp: Warp, lane: int, allocation: ByteMemory, chunks: Chunks, i: Instruction
    ) -> None:
        shadow = self._shadow(allocation)
        self._copy(warp, lane, shadow, chunks, i, "writes")
        group = self._watch.bulk_engine(warp, lane)
        shadow.clusters[chunks] = self._cluster(warp)
        shadow.writers[chunks] = group.column
        shadow.written[chunks] = group.issued + 1 << STAMP | self._watch.number(i)

    def _copy(
        self, warp: Warp, lane: int, shadow: _Shadow, chunks: Chunks, i: Instruction, does: str
    ) -> None:
        """A copy after writes of the cluster; copies that write one after the other are let be."""
        clocks = self._watch.of(warp.block.cluster).clocks
        thread = self._watch.who(warp).first + lane
        columns, epochs = shadow.writers[chunks], shadow.written[chunks] >> STAMP
        own = shadow.clusters[chunks] == self._cluster(warp)
        if does == "writes":
            own &= columns < clocks.threads
        if not own.any():
            return
        row = clocks.row(thread)
        late = own & (row[DEVICE][np.where(own, columns, 0)] < epochs)
        late &= (columns != thread) | (epochs > clocks.own(thread, DEVICE))
        if late.any():
            n = int(late.argmax())
            ordered = columns[n] == thread or row[ORDERED, columns[n]] >= epochs[n]
            self._tell(warp, thread, shadow, int(chunks[n]), i, does, ordered=bool(ordered))

    def _tell(
        self,
        warp: Warp,
        thread: int,
        shadow: _Shadow,
        chunk: int,
        i: Instruction,
        does: str,
        *,
        ordered: bool,
    ) -> None:
        watch, cluster = self._watch, warp.block.cluster
        column, number = int(shadow.writers[chunk]), int(shadow.written[chunk]) & NUMBER
        who = watch.actor(cluster, column)
        kind, missing = "race", watch.missing(cluster, column)
        if ordered:
            kind, missing = "unfenced", "no fence.proxy.async lies between the two"
        name = shadow.allocation.name
        message = f"{i.name} {does} {name} at offset {chunk * CHUNK:#x} that {who} wrote: {missing}"
        other = f"{watch.instructions[number].name} by {who}, {watch.place(number)}"
        watch.report(kind, message, warp, thread, i, other, barrier=name, number=number)

    def _shadow(self, allocation: ByteMemory) -> _Shadow:
        found = self._shadows.get(id(allocation))
        if found is None:
            count = allocation.bytes.size // CHUNK + 1
            arrays = np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, np.int64)
            found = self._shadows[id(allocation)] = _Shadow(allocation, *arrays)
        return found

    def _cluster(self, warp: Warp) -> int:
        return self._clusters.setdefault(warp.block.cluster.index, len(self._clusters) + 1)
