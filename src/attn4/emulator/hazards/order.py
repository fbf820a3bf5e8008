"""What orders the accesses of a cluster: barriers pass clocks on, engines complete groups of operations.

order.arrive(sync, who, mask, phase)      release into the phase that is under way
order.wait(sync, who, mask, phase)        acquire what the completed phases have gathered
engine = order.engine(key, Column(...))   the column of an engine, made when it is first used
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.clocks import (
    DEVICE,
    FENCED,
    FINISHED,
    ORDERED,
    PLANES,
    TENSOR,
    Clocks,
    Column,
    Mask,
    Row,
    Who,
)

ALL_PLANES = (ORDERED, FENCED, FINISHED, TENSOR, DEVICE)


@dataclass(slots=True, eq=False)
class Sync:
    """The clocks of a barrier: ``pending`` gathers those of the phase under way, ``done`` holds all before.

    ``column`` is that of the copies that complete on it, of which the phase number is the epoch; -1: none.
    ``promised`` are arrivals to come: the epoch of each engine that will have made them. ``waited`` holds
    the epochs of threads when they waited last, where mbarriers end.
    ``made`` is the thread that initialised it, and its epoch then, ``number`` the instruction.
    """

    pending: Row
    done: Row
    phase: int = 0
    column: int = -1
    made: tuple[int, int] | None = None
    number: int = 0
    promised: dict[int, int] = field(default_factory=dict)
    waited: NDArray[np.int32] | None = None


@dataclass(slots=True, eq=False)
class Engine:
    """Operations in order, of one thread or warp: ``issued`` counts them, or the groups of them.

    ``column`` is known once an operation is complete. ``reads`` is the column that is known once the sources
    are read, where that is told apart.
    """

    column: int
    reads: int = -1
    issued: int = 0
    number: int = 0


@dataclass(slots=True)
class Order:
    """All that orders the threads of one cluster."""

    clocks: Clocks
    syncs: dict[Hashable, Sync] = field(default_factory=dict)
    engines: dict[Hashable, Engine] = field(default_factory=dict)
    tensor_columns: list[int] = field(default_factory=list)

    def sync(self, key: Hashable) -> Sync:
        """The clocks of the barrier called ``key``."""
        found = self.syncs.get(key)
        if found is None:
            found = self.syncs[key] = self._new_sync()
        return found

    def renew(self, key: Hashable) -> Sync:
        """Clocks of a barrier that has been initialised: what it knew before is forgotten."""
        self.syncs[key] = found = self._new_sync()
        return found

    def engine(self, key: Hashable, column: Column, reads: Column | None = None) -> Engine:
        """The engine called ``key``; ``column`` and ``reads`` describe it when it is new."""
        found = self.engines.get(key)
        if found is None:
            found = Engine(self.clocks.column(column))
            if reads is not None:
                found.reads = self.clocks.column(reads)
            if column.tensor:
                self.tensor_columns.append(found.column)
            self.engines[key] = found
        return found

    def arrive(self, sync: Sync, who: Who, mask: Mask | None, phase: int, *, relaxed: bool = False) -> None:
        """Release into ``phase``. ``relaxed`` orders tcgen05 operations alone (PTX 9.7.16.6.4)."""
        self.settle(sync, phase)
        row = self.clocks.release(who, mask)
        if relaxed:
            row = self._relaxed(row)
        np.maximum(sync.pending, row, out=sync.pending)

    def arrive_with(self, sync: Sync, phase: int, row: Row) -> None:
        """An arrival that carries ``row``."""
        self.settle(sync, phase)
        np.maximum(sync.pending, self.clocks.widened(row), out=sync.pending)

    def complete_operation(
        self,
        sync: Sync,
        phase: int,
        column: int,
        epoch: int,
        planes: tuple[int, ...] = (ORDERED, FENCED, FINISHED, DEVICE),
    ) -> None:
        """An arrival that an engine makes: it carries what the engine has done, and nothing else."""
        self.settle(sync, phase)
        pending = sync.pending
        for plane in planes:
            pending[plane, column] = max(pending[plane, column], epoch)

    def wait(self, sync: Sync, who: Who, mask: Mask | None, phase: int, *, relaxed: bool = False) -> None:
        """Acquire the phases before ``phase``."""
        self.settle(sync, phase)
        self.clocks.acquire(who, mask, self._relaxed(sync.done) if relaxed else sync.done)

    def settle(self, sync: Sync, phase: int) -> None:
        """Take note that all phases before ``phase`` are complete."""
        width = self.clocks.width
        if sync.done.shape[1] != width:
            sync.done, sync.pending = self.clocks.widened(sync.done), self.clocks.widened(sync.pending)
        if phase > sync.phase:
            np.maximum(sync.done, sync.pending, out=sync.done)
            sync.pending.fill(0)
            sync.phase = phase
            if sync.column >= 0:
                sync.done[:, sync.column] = phase

    def _new_sync(self) -> Sync:
        shape = (PLANES, self.clocks.width)
        return Sync(np.zeros(shape, np.int32), np.zeros(shape, np.int32))

    def _relaxed(self, row: NDArray[np.int32]) -> NDArray[np.int32]:
        kept = np.zeros_like(row)
        kept[FINISHED] = row[FINISHED]
        kept[ORDERED, self.tensor_columns] = row[ORDERED, self.tensor_columns]
        return kept
