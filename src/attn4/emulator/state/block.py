"""What a CTA and a cluster own: shared memory, parameters, barriers, and the warps that sleep until those
change.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from attn4.emulator.faults import BarrierFault
from attn4.emulator.state.barrier import ClusterBarrier, Mbarrier, NamedBarrier, whole_warps
from attn4.emulator.state.local import LocalMemory, local_layout
from attn4.emulator.state.register_pool import RegisterPool
from attn4.emulator.state.tensor_memory import TensorMemory

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.grid import Grid
    from attn4.emulator.ptx.module import Kernel
    from attn4.emulator.state.memory import SharedMemory

Dim3: TypeAlias = tuple[int, int, int]

RANK_SHIFT = 24
"""A shared address is (rank in the cluster << 24) | offset."""
OFFSET_MASK = (1 << RANK_SHIFT) - 1
SYSTEM_SHARED_BYTES = 0x400
"""Shared memory below this offset belongs to the system (sm_90 and later)."""
NAMED_BARRIERS = 16


@dataclass(slots=True, eq=False, repr=False)
class Cluster:
    """CTAs that share a barrier and each other's shared memory; a launch without clusters makes one of each
    CTA. ``watched`` is what a Watch knows of it.
    """

    index: Dim3
    shape: Dim3
    blocks: list[Block] = field(default_factory=list)
    barrier: ClusterBarrier = field(default_factory=lambda: ClusterBarrier(0))
    sleeping: list[Warp] = field(default_factory=list)
    watched: Any = None

    def rank(self, rank: int) -> Block:
        """The CTA of that rank. Raises BarrierFault if the cluster is smaller."""
        if rank >= len(self.blocks):
            raise BarrierFault(f"an address in CTA {rank} of a cluster of {len(self.blocks)}")
        return self.blocks[rank]


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """One CTA. ``number`` counts CTAs of the grid, ``rank`` is the place in the cluster, ``threads`` its
    shape.

    ``mbarriers`` maps shared offsets to the objects initialised there.
    """

    grid: Grid
    cluster: Cluster
    number: int
    index: Dim3
    rank: int
    threads: Dim3
    shared: SharedMemory
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    named: dict[int, NamedBarrier] = field(default_factory=dict)
    warps: list[Warp] = field(default_factory=list)
    tensor_permit_given_up: bool = False
    _tensor: TensorMemory | None = None
    _pool: RegisterPool | None = None
    _local: LocalMemory | None = None

    @property
    def local_memory(self) -> LocalMemory:
        """The local memory of the CTA's threads, made when it is first used."""
        if self._local is None:
            _, size = local_layout(self.grid.program.kernel.local)
            self._local = LocalMemory(-(-extent(self.threads) // 32) * 32, size)
        return self._local

    @property
    def tensor_memory(self) -> TensorMemory:
        """The CTA's tensor memory, made when it is first used; each CTA has one of its own."""
        if self._tensor is None:
            self._tensor = TensorMemory()
        return self._tensor

    @property
    def uses_tensor_memory(self) -> bool:
        """Whether it has been used."""
        return self._tensor is not None

    @property
    def register_pool(self) -> RegisterPool:
        """The registers that setmaxnreg moves between the CTA's warps, counted from its first use on."""
        if self._pool is None:
            launch = self.grid.program.kernel.launch
            self._pool = RegisterPool.of(extent(self.threads), launch.minnctapersm or 1, launch.maxnreg)
        return self._pool

    def tensor_columns_held(self) -> dict[Hashable, int]:
        """Columns of tensor memory by who holds them."""
        return {} if self._tensor is None else self._tensor.leaks()

    def mbarrier(self, address: int) -> Mbarrier:
        """The mbarrier at a shared address of this cluster. Raises BarrierFault if none was initialised
        there.
        """
        rank = address >> RANK_SHIFT
        block = self if rank == self.rank else self.cluster.rank(rank)
        offset = address & OFFSET_MASK
        found = block.mbarriers.get(offset)
        if found is None:
            name = self.grid.layout.variable(offset)
            where = f"{name} ({offset:#x})" if name else f"{offset:#x}"
            raise BarrierFault(f"no mbarrier was initialised at {where} of CTA {block.index}")
        return found

    def named_barrier(self, index: int) -> NamedBarrier:
        """Barrier ``index`` of the CTA."""
        if not 0 <= index < NAMED_BARRIERS:
            raise BarrierFault(f"named barrier {index}: there are barriers 0 to {NAMED_BARRIERS - 1}")
        return self.named.setdefault(index, NamedBarrier(index))

    @property
    def living(self) -> int:
        """Threads that take part in a barrier of the whole CTA: 32 for each warp that has not exited."""
        return 32 * sum(whole_warps(warp.alive) for warp in self.warps)

    def wake(self) -> None:
        """Let the warps of the cluster look again whose wait may be over: something has happened."""
        self.grid.changes += 1
        sleeping = self.cluster.sleeping
        if sleeping:
            self.grid.ready.extend(warp for warp in sleeping if warp.may_proceed)
            sleeping[:] = [warp for warp in sleeping if not warp.may_proceed]

    def __str__(self) -> str:
        return f"CTA {self.index}"


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Offsets of the shared variables of a kernel, and the bytes of a CTA's shared memory with all of
    them.
    """

    offsets: dict[str, int]
    size: int

    @classmethod
    def of(cls, kernel: Kernel, dynamic_bytes: int) -> SharedLayout:
        """Variables of known size first, in their order; then dynamic shared memory, which extern arrays
        share.
        """
        offsets: dict[str, int] = {}
        at = SYSTEM_SHARED_BYTES
        known = [variable for variable in kernel.shared if not variable.extern]
        for variable in known:
            at = offsets[variable.name] = _aligned(at, variable.align)
            at += variable.size
        outside = [variable for variable in kernel.shared if variable.extern]
        at = _aligned(at, max((variable.align for variable in outside), default=1))
        for variable in outside:
            offsets[variable.name] = at
        return cls(offsets, at + dynamic_bytes)

    def variable(self, offset: int) -> str:
        """The variable that holds a shared offset, and how far behind its start; empty if there is none."""
        start, name = max(((at, name) for name, at in self.offsets.items() if at <= offset), default=(0, ""))
        return f"{name}+{offset - start:#x}" if name and offset > start else name


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def extent(shape: Iterable[int]) -> int:
    """The number of threads or CTAs of a shape."""
    total = 1
    for size in shape:
        total *= size
    return total
