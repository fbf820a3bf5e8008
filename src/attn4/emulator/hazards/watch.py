"""What the units and definitions of the machine tell when hazards are looked for: a grid has one Watch.

Barriers, fences and the groups of asynchronous operations go to the clocks here; accesses are checked in
``shared`` and ``tensor``. An asynchronous operation is recorded when it is issued: from then on it may touch
memory at any time, until the issuer or another thread learns that it is complete. So what is found does not
depend on when the schedule lets it complete.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.clocks import (
    ALWAYS,
    FINISHED,
    ORDERED,
    TENSOR,
    WARP,
    Clocks,
    Column,
    Mask,
    Who,
)
from attn4.emulator.hazards.copies import Copies
from attn4.emulator.hazards.device import DeviceAccesses
from attn4.emulator.hazards.findings import Findings, Hazard
from attn4.emulator.hazards.flags import Flags
from attn4.emulator.hazards.lifetime import Lifetimes
from attn4.emulator.hazards.order import ALL_PLANES, Engine, Order, Sync
from attn4.emulator.hazards.shared import SharedAccesses
from attn4.emulator.hazards.tensor import TensorAccesses
from attn4.emulator.state.block import OFFSET_MASK, RANK_SHIFT, extent
from attn4.emulator.state.local import LocalView
from attn4.emulator.state.memory import ByteMemory, GlobalMemory, SharedMemory

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.grid import Grid
    from attn4.emulator.ptx.module import Instruction
    from attn4.emulator.state.barrier import Mbarrier
    from attn4.emulator.state.block import Block, Cluster

Lanes = NDArray[Any]
Memory = ByteMemory | GlobalMemory | LocalView

ACQUIRES = frozenset({"acquire", "acq_rel"})
RELEASES = frozenset({"release", "acq_rel"})
STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"})


@dataclass(slots=True)
class Watched:
    """What is known of one cluster: its clocks, and the shadows of the memories of its CTAs."""

    clocks: Clocks
    order: Order
    shadows: dict[Hashable, Any] = field(default_factory=dict)


class Watch:
    """Follows one launch. ``findings`` is where it reports.

    A program without any tcgen05.fence is not held to the rules for them, and one without tcgen05.wait::ld
    is taken to wait for each tcgen05.ld by the use of its registers (PTX 9.7.16.6.4.5): CuTe DSL compiles
    kernels like that, which are right on silicon. ``strict`` holds every program to them.
    """

    def __init__(self, grid: Grid, findings: Findings, *, strict: bool = False) -> None:
        self.grid = grid
        uses = {i.modifiers[0] for i in grid.program.instructions if i.opcode == "tcgen05"}
        self.needs_fences = strict or any(name.startswith("fence::") for name in uses)
        self.needs_wait = strict or "wait::ld" in uses
        self.findings = findings
        self.shared = SharedAccesses(self)
        self.tensor = TensorAccesses(self)
        self.copies = Copies(self)
        self.flags = Flags(self)
        self.device = DeviceAccesses(self)
        self.lifetimes = Lifetimes(self)
        self.instructions: list[Instruction] = []
        self._numbers: dict[int, int] = {}
        self._strong: dict[int, bool] = {}

    # The actors.

    def of(self, cluster: Cluster) -> Watched:
        """What is known of a cluster."""
        found: Watched | None = cluster.watched
        if found is None:
            threads = extent(self.grid.shape.block)
            together = min(self.grid.schedule.warps_together, -(-threads // WARP))
            clocks = Clocks(threads, extent(cluster.shape), together)
            found = cluster.watched = Watched(clocks, Order(clocks))
        return found

    def who(self, warp: Warp) -> Who:
        """The lanes of ``warp`` in its cluster."""
        lane, lanes = int(warp.threads[0]), len(warp.threads)
        known: Who | None = warp.state.get(("who", lane, lanes))
        if known is None:
            clocks = self.of(warp.block.cluster).clocks
            first = warp.block.rank * clocks.warps_a_block * WARP + lane
            known = warp.state["who", lane, lanes] = Who(first, lanes)
        return known

    def lanes(self, warp: Warp, mask: Mask) -> Mask | None:
        """The mask of the clocks: None where all lanes are active."""
        return None if mask is warp.everyone else mask

    def left(self, warp: Warp, leaving: Mask) -> None:
        """Threads have exited."""
        who = self.who(warp)
        self.of(warp.block.cluster).clocks.living[who.first : who.first + who.lanes][leaving] = False

    def number(self, i: Instruction) -> int:
        """The number by which accesses refer to an instruction."""
        found = self._numbers.get(id(i))
        if found is None:
            found = self._numbers[id(i)] = len(self.instructions)
            self.instructions.append(i)
        return found

    # Barriers.

    def mbarrier_made(self, warp: Warp, mask: Mask, address: int, i: Instruction) -> None:
        """mbarrier.init: from now on it may be used by whoever knows of it."""
        block, offset = warp.block, address & OFFSET_MASK
        order = self.of(block.cluster).order
        thread = self.who(warp).first + int(mask.argmax())
        if offset in block.mbarriers:
            where = self._where(block, offset)
            message = (
                f"mbarrier.init at {where}, where an mbarrier is in use that mbarrier.inval has not ended"
            )
            self.report("barrier", message, warp, thread, i, str(block.mbarriers[offset]), barrier=where)
        sync = order.renew((block.rank, offset))
        self.shared.store(warp, mask, block.shared, np.full(warp.lanes, address), 8, i)
        sync.made = (thread, int(order.clocks.epochs[thread // WARP]))
        sync.number = self.number(i)

    def mbarrier_arrives(
        self, warp: Warp, mask: Mask, barrier: Mbarrier, rank: int, i: Instruction, *, relaxed: bool = False
    ) -> None:
        """An arrival by threads, before it is counted: a release unless ``relaxed``."""
        order = self.of(warp.block.cluster).order
        sync = self._mbarrier(warp, mask, barrier, rank, i)
        order.arrive(sync, self.who(warp), self.lanes(warp, mask), barrier.phase, relaxed=relaxed)

    def mbarrier_passed(
        self, warp: Warp, mask: Mask, barrier: Mbarrier, rank: int, i: Instruction, *, relaxed: bool = False
    ) -> None:
        """A wait of the lanes of ``mask`` that found its phase complete: an acquire unless ``relaxed``."""
        order = self.of(warp.block.cluster).order
        sync = self._mbarrier(warp, mask, barrier, rank, i)
        order.wait(sync, self.who(warp), self.lanes(warp, mask), barrier.phase, relaxed=relaxed)
        self.lifetimes.waited(sync, warp, mask)

    def mbarrier_used(self, warp: Warp, mask: Mask, barrier: Mbarrier, rank: int, i: Instruction) -> None:
        """An operation on an mbarrier that orders nothing: expect_tx, or one that names it for a copy."""
        self._mbarrier(warp, mask, barrier, rank, i)

    def mbarrier_column(self, block: Block, barrier: Mbarrier, rank: int) -> tuple[int, int]:
        """The column of the copies that complete on a barrier, and the epoch of the phase under way."""
        order = self.of(block.cluster).order
        sync = order.sync((rank, barrier.address))
        order.settle(sync, barrier.phase)
        if sync.column < 0:
            name = f"a copy that completes on the mbarrier at {self._where(block, barrier.address)}"
            missing = "nothing that was waited for says that the copy is complete"
            sync.column = order.clocks.column(Column(name, missing))
            order.settle(sync, barrier.phase)
        return sync.column, barrier.phase + 1

    def _mbarrier(self, warp: Warp, mask: Mask, barrier: Mbarrier, rank: int, i: Instruction) -> Sync:
        watched = self.of(warp.block.cluster)
        sync = watched.order.sync((rank, barrier.address))
        if rank != warp.block.rank:
            self.lifetimes.alive(warp, int(mask.argmax()), rank, i)
        if sync.made is not None:
            maker, epoch = sync.made
            thread = self.who(warp).first + int(mask.argmax())
            if thread != maker and watched.clocks.row(thread)[ORDERED, maker] < epoch:
                where = self._where(warp.block, barrier.address)
                message = (
                    f"the mbarrier at {where} is used by a thread that does not know of its initialisation: "
                    f"no barrier orders the two"
                )
                other = (
                    f"mbarrier.init by {self.thread(warp.block.cluster, maker)}, {self.place(sync.number)}"
                )
                self.report("barrier", message, warp, thread, i, other, barrier=where, number=sync.number)
                sync.made = None
        return sync

    def mbarrier_ended(self, warp: Warp, mask: Mask, barrier: Mbarrier, rank: int, i: Instruction) -> None:
        """mbarrier.inval: whoever arrived or waited must be known to have."""
        watched = self.of(warp.block.cluster)
        sync = self._mbarrier(warp, mask, barrier, rank, i)
        watched.order.settle(sync, barrier.phase)
        thread = self.who(warp).first + int(mask.argmax())
        known = watched.clocks.row(thread)[ORDERED].copy()
        known[thread] = ALWAYS
        used = np.maximum(sync.pending, sync.done)[ORDERED]
        if sync.waited is not None:
            used[: len(sync.waited)] = np.maximum(used[: len(sync.waited)], sync.waited)
        late = np.flatnonzero(used > known)
        if late.size:
            where = self._where(warp.block, barrier.address)
            who = self.actor(warp.block.cluster, int(late[0]))
            message = (
                f"mbarrier.inval of {where}, at which {who} arrived or waited: no barrier orders the two"
            )
            self.report("barrier", message, warp, thread, i, str(barrier), barrier=where)
        watched.order.syncs.pop((rank, barrier.address), None)

    def named_arrives(self, warp: Warp, mask: Mask, index: int, phase: int) -> None:
        """bar.arrive and bar.sync, before the threads are counted: a release."""
        order = self.of(warp.block.cluster).order
        sync = order.sync(("named", warp.block.rank, index))
        order.arrive(sync, self.who(warp), self.lanes(warp, mask), phase)

    def named_passed(self, warp: Warp, mask: Mask, index: int, phase: int) -> None:
        """bar.sync that has waited: an acquire."""
        order = self.of(warp.block.cluster).order
        sync = order.sync(("named", warp.block.rank, index))
        order.wait(sync, self.who(warp), self.lanes(warp, mask), phase)

    def cluster_arrives(self, warp: Warp, mask: Mask, phase: int, *, relaxed: bool) -> None:
        """barrier.cluster.arrive, before it is counted: a release unless ``relaxed``."""
        order = self.of(warp.block.cluster).order
        sync = order.sync("cluster")
        who, lanes = self.who(warp), self.lanes(warp, mask)
        order.arrive(sync, who, lanes, phase, relaxed=relaxed)
        if relaxed:
            self._announce(order, sync, warp, mask)

    def cluster_passed(self, warp: Warp, mask: Mask, phase: int) -> None:
        """barrier.cluster.wait: an acquire."""
        order = self.of(warp.block.cluster).order
        order.wait(order.sync("cluster"), self.who(warp), self.lanes(warp, mask), phase)

    def _announce(self, order: Order, sync: Sync, warp: Warp, mask: Mask) -> None:
        """A relaxed arrival after fence.mbarrier_init still makes the mbarriers known that it fenced."""
        first = self.who(warp).first
        for lane in np.flatnonzero(mask).tolist():
            epoch = warp.state.get(("mbarrier init fenced", lane))
            if epoch is not None:
                sync.pending[ORDERED, first + lane] = max(sync.pending[ORDERED, first + lane], epoch)
        del order

    def warp_sync(self, warp: Warp, mask: Mask) -> None:
        """bar.warp.sync, of the lanes that have met."""
        self.of(warp.block.cluster).clocks.meet(self.who(warp), self.lanes(warp, mask))

    # Accesses of threads.

    def loads(
        self, warp: Warp, mask: Mask | None, memory: Memory, addresses: Lanes, nbytes: int, i: Instruction
    ) -> None:
        """A load by the lanes of ``mask`` (None: all) of ``nbytes`` each."""
        if isinstance(memory, SharedMemory):
            self.shared.load(warp, mask, memory, addresses, nbytes, i)
        elif isinstance(memory, GlobalMemory):
            self.device.load(warp, mask, memory, addresses, nbytes, i)
        if self.is_strong(i) and not isinstance(memory, LocalView):
            self.flags.loads(warp, mask, addresses, acquire=ACQUIRES.intersection(i.modifiers))

    def stores(
        self,
        warp: Warp,
        mask: Mask | None,
        memory: Memory,
        addresses: Lanes,
        data: Lanes,
        nbytes: int,
        i: Instruction,
    ) -> None:
        """A store by the lanes of ``mask`` (None: all) of ``nbytes`` each, which has been done."""
        if isinstance(memory, SharedMemory):
            self.shared.store(warp, mask, memory, addresses, nbytes, i)
            self.shared.same_address(warp, mask, memory, addresses, data, nbytes, i)
            self.lifetimes.used_as_data(warp, mask, memory, addresses, nbytes, i)
        elif isinstance(memory, GlobalMemory):
            self.device.store(warp, mask, memory, addresses, nbytes, i)
        if self.is_strong(i) and not isinstance(memory, LocalView):
            self.flags.stores(warp, mask, addresses, release=RELEASES.intersection(i.modifiers))

    def atomic(self, warp: Warp, mask: Mask, addresses: Lanes, nbytes: int, i: Instruction) -> None:
        """Atom or red by the lanes of ``mask``."""
        lanes = np.flatnonzero(mask)
        first = int(addresses[lanes[0]])
        in_shared = first < len(warp.block.cluster.blocks) << RANK_SHIFT
        if in_shared and "global" not in i.modifiers and not self.grid.memory.holds(first):
            for lane in lanes.tolist():
                memory = warp.block.cluster.rank(int(addresses[lane]) >> RANK_SHIFT).shared
                one = np.arange(warp.lanes) == lane
                self.shared.store(warp, one, memory, addresses, nbytes, i)
        self.flags.loads(warp, mask, addresses, acquire=ACQUIRES.intersection(i.modifiers))
        self.flags.stores(warp, mask, addresses, release=RELEASES.intersection(i.modifiers))

    def allocates(self, warp: Warp, mask: Mask, address: int, i: Instruction) -> None:
        """tcgen05.alloc writes an address to shared memory."""
        one = np.arange(warp.lanes) == int(mask.argmax())
        self.shared.store(warp, one, warp.block.shared, np.full(warp.lanes, address), 4, i)

    def is_strong(self, i: Instruction) -> bool:
        """Whether two such accesses to one address are no race: volatile, relaxed and stronger, atomics."""
        known = self._strong.get(id(i))
        if known is None:
            known = i.opcode in ("atom", "red") or bool(STRONG.intersection(i.modifiers))
            self._strong[id(i)] = known
        return known

    # Fences.

    def fence_proxy(self, warp: Warp, mask: Mask, planes: Sequence[int]) -> None:
        """fence.proxy.async (PTX 9.7.13.4). ``planes``: FENCED for shared memory, DEVICE for global."""
        self.of(warp.block.cluster).clocks.fence(self.who(warp), self.lanes(warp, mask), planes)

    def fence_threads(self, warp: Warp, mask: Mask) -> None:
        """fence.acq_rel, fence.sc, membar: relaxed accesses before acquire, those after it release."""
        self.flags.fence(warp, mask)

    def fence_mbarrier_init(self, warp: Warp, mask: Mask) -> None:
        """fence.mbarrier_init.release.cluster: what a relaxed arrival at the cluster's barrier will carry."""
        epochs = self.of(warp.block.cluster).clocks.epochs
        first = self.who(warp).first
        for lane in np.flatnonzero(mask).tolist():
            warp.state["mbarrier init fenced", lane] = int(epochs[(first + lane) // WARP])

    def tensor_fence(self, warp: Warp, mask: Mask, *, before: bool) -> None:
        """tcgen05.fence::before_thread_sync and ::after_thread_sync (PTX 9.7.16.11)."""
        watched = self.of(warp.block.cluster)
        who, lanes = self.who(warp), self.lanes(warp, mask)
        if not before:
            watched.clocks.raise_plane(who, lanes, TENSOR, FINISHED)
            return
        watched.clocks.raise_plane(who, lanes, FINISHED, ORDERED)
        for lane in np.flatnonzero(mask).tolist():
            engine = watched.order.engines.get(("tcgen05", who.first + lane))
            if engine is not None:
                one = np.arange(who.lanes) == lane
                watched.clocks.learn(who, one, engine.column, engine.issued, (FINISHED,))

    # Engines.

    def engine(self, warp: Warp, kind: str, actor: int, what: str, missing: str) -> Engine:
        """The engine of one kind of operation of a thread or warp of the cluster (by its number there)."""
        order = self.of(warp.block.cluster).order
        found = order.engines.get((kind, actor))
        if found is None:
            tensor = kind.startswith("tcgen05")
            column = Column(what, missing, tensor=tensor, pipelined=kind == "tcgen05")
            found = order.engine((kind, actor), column)
        return found

    def bulk_engine(self, warp: Warp, lane: int) -> Engine:
        """The bulk async-groups of a thread: one column for sources read, one for all done."""
        order = self.of(warp.block.cluster).order
        thread = self.who(warp).first + lane
        found = order.engines.get(("bulk", thread))
        if found is None:
            name = f"a bulk copy of {self.thread(warp.block.cluster, thread)}"
            missing = (
                "no cp.async.bulk.wait_group of its issuer, passed on by a barrier, says that it is over"
            )
            found = order.engine(("bulk", thread), Column(name, missing), Column(name, missing))
        return found

    def bulk_waited(self, warp: Warp, lane: int, pending: int, *, read: bool) -> None:
        """cp.async.bulk.wait_group: all groups but the last ``pending`` are over (or their sources read)."""
        engine = self.bulk_engine(warp, lane)
        clocks = self.of(warp.block.cluster).clocks
        who = self.who(warp)
        one = np.arange(who.lanes) == lane
        mask = self.lanes(warp, one)
        clocks.learn(who, mask, engine.reads, engine.issued - pending, ALL_PLANES)
        if not read:
            clocks.learn(who, mask, engine.column, engine.issued - pending, ALL_PLANES)

    def products_of(self, warp: Warp, number: int) -> Engine:
        """The wgmma groups of a warp, by its number in the CTA."""
        actor = (self.who(warp).first - int(warp.threads[0])) // WARP + number
        name = f"wgmma of warp {number} of CTA {warp.block.index}"
        missing = "no wgmma.wait_group, passed on by a barrier, says that the product is complete"
        return self.engine(warp, "wgmma", actor, name, missing)

    def products_committed(self, warp: Warp, mask: Mask) -> None:
        """wgmma.commit_group of the warps with lanes in ``mask``."""
        for position, number in enumerate(warp.numbers):
            if mask[position * WARP : (position + 1) * WARP].any():
                self.products_of(warp, number).issued += 1

    def products_waited(self, warp: Warp, mask: Mask, pending: int) -> None:
        """wgmma.wait_group of the warps with lanes in ``mask``."""
        clocks = self.of(warp.block.cluster).clocks
        for position, number in enumerate(warp.numbers):
            if mask[position * WARP : (position + 1) * WARP].any():
                engine = self.products_of(warp, number)
                one = Who(self.who(warp).first + position * WARP, WARP)
                clocks.learn(one, None, engine.column, engine.issued - pending, ALL_PLANES)

    # Reports.

    def report(
        self,
        kind: str,
        message: str,
        warp: Warp,
        thread: int | None,
        i: Instruction,
        other: str = "",
        *,
        barrier: str = "",
        number: int | None = None,
    ) -> None:
        """Add a hazard found at instruction ``i`` of ``thread``; ``number`` is the other's instruction."""
        place = thread if thread is not None else self.who(warp).first
        within = place - self.who(warp).first + int(warp.threads[0])
        hazard = Hazard(
            kind,
            message,
            self.grid.program.kernel.name,
            warp.block.index,
            within // WARP,
            None if thread is None else within % WARP,
            i.line,
            None if i.source is None else str(i.source),
            other,
            barrier,
        )
        self.findings.add(hazard, other_line=0 if number is None else self.instructions[number].line)

    def thread(self, cluster: Cluster, thread: int) -> str:
        """A thread of the cluster in words."""
        size = self.of(cluster).clocks.warps_a_block * WARP
        block = cluster.blocks[thread // size]
        return f"warp {thread % size // WARP}, lane {thread % WARP} of CTA {block.index}"

    def actor(self, cluster: Cluster, column: int) -> str:
        """Who acts in a column, in words."""
        clocks = self.of(cluster).clocks
        if column < clocks.threads:
            return self.thread(cluster, column)
        return clocks.columns[column - clocks.threads].name

    def missing(self, cluster: Cluster, column: int) -> str:
        """What would have ordered an access after those of a column."""
        clocks = self.of(cluster).clocks
        if column < clocks.threads:
            return "no barrier orders the two"
        return clocks.columns[column - clocks.threads].missing

    def place(self, number: int) -> str:
        """Where an instruction stands."""
        i = self.instructions[number]
        return f"PTX line {i.line}" + (f" ({i.source})" if i.source else "")

    def _where(self, block: Block, offset: int) -> str:
        return self.shared.name(block, offset)
