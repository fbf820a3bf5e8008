"""Barriers: mbarriers, named barriers of a CTA, and the barrier of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.faults import BarrierFault
from attn4.emulator.state.active import active

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

TRANSACTION_LIMIT = (1 << 20) - 1
ARRIVAL_LIMIT = (1 << 20) - 1


@dataclass(slots=True)
class Mbarrier:
    """An mbarrier object (PTX 9.7.13.15), with the whole phase number where hardware keeps one bit of it.

    ``address`` is its shared offset, ``expected`` the arrivals a phase takes, ``pending`` those it still
    lacks, ``transactions`` the bytes announced less the bytes delivered. ``last`` says who arrived last,
    ``name`` which variable of the program it is.
    """

    address: int
    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0
    last: object = "nobody"
    name: str = ""

    @classmethod
    def of(cls, address: int, count: int, name: str = "") -> Mbarrier:
        """A barrier in phase 0 that takes ``count`` arrivals a phase."""
        if not 1 <= count <= ARRIVAL_LIMIT:
            raise BarrierFault(
                f"mbarrier at {address:#x}: an arrival count of {count}, not 1..{ARRIVAL_LIMIT}"
            )
        return cls(address, count, count, name=name)

    def arrive(self, count: int, who: object) -> bool:
        """Take ``count`` arrivals off the phase; true if that completes it."""
        if count > self.pending:
            raise BarrierFault(
                f"{self}: {count} arrival{'s' if count > 1 else ''} by {who}, but phase {self.phase} takes "
                f"only {self.pending} more; arrived last: {self.last}"
            )
        self.pending -= count
        self.last = who
        return self._complete()

    def drop(self, count: int, who: object) -> bool:
        """Arrive, and expect ``count`` fewer arrivals from the next phase on."""
        self.expected -= count
        return self.arrive(count, who)

    def expect(self, transactions: int) -> None:
        """Announce ``transactions`` bytes for the current phase."""
        self.transactions += transactions
        if self.transactions > TRANSACTION_LIMIT:
            raise BarrierFault(
                f"{self}: {self.transactions} bytes expected, the limit is {TRANSACTION_LIMIT}"
            )

    def deliver(self, transactions: int, who: object) -> bool:
        """Count ``transactions`` bytes as delivered; true if that completes the phase."""
        self.transactions -= transactions
        if self.transactions < -TRANSACTION_LIMIT:
            raise BarrierFault(
                f"{self}: {-self.transactions} bytes delivered that nobody announced; last by {who}"
            )
        return self._complete()

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is complete: the current one has the other parity."""
        return self.phase & 1 != parity

    def _complete(self) -> bool:
        if self.pending or self.transactions:
            return False
        self.phase += 1
        self.pending = self.expected
        return True

    def __str__(self) -> str:
        bytes_left = f", {self.transactions} bytes outstanding" if self.transactions else ""
        return (
            f"mbarrier {self.name}{' ' if self.name else ''}at {self.address:#x} in phase {self.phase} "
            f"({self.pending} of {self.expected} arrivals outstanding{bytes_left})"
        )


@dataclass(slots=True)
class NamedBarrier:
    """One of the 16 barriers of a CTA (PTX ``barrier``): threads are counted by whole warps.

    ``phase`` counts completions. ``everyone``: no count was given, so all threads of the CTA that have not
    exited take part. ``votes`` gathers the predicates of ``barrier.red`` in the current phase, and
    ``result`` holds (any, all, count) of the phase before.
    """

    index: int
    phase: int = 0
    expected: int = 0
    arrived: int = 0
    everyone: bool = False
    votes: list[tuple[int, int]] = field(default_factory=list)
    result: tuple[bool, bool, int] = (False, False, 0)
    last: object = "nobody"
    shares: dict[int, int] = field(default_factory=dict)

    def arrive(self, threads: int, expected: int, who: Warp, *, waits: bool = True) -> bool:
        """Count ``threads`` more; true if all ``expected`` are there. A phase has one expected count.

        A warp that arrives in a phase twice without waiting is counted in the place of another: ``shares``
        holds how many threads each has brought so, and more than it has is a fault.
        """
        if self.arrived and self.expected != expected:
            raise BarrierFault(f"{self}: {who} expects {expected} threads, others expect {self.expected}")
        self.expected = expected
        self.arrived += threads
        share = self.shares[id(who)] = self.shares.get(id(who), 0) + (0 if waits else threads)
        if share > who.lanes:
            raise BarrierFault(f"{self}: {who} arrives twice in one phase; arrived last: {self.last}")
        self.last = who
        if self.arrived > expected:
            raise BarrierFault(f"{self}: {self.arrived} threads have arrived, last {who}")
        return self.complete()

    def complete(self) -> bool:
        """End the phase if all are there; true if so."""
        if not self.arrived or self.arrived < self.expected:
            return False
        true, total = (sum(column) for column in zip(*self.votes, strict=True)) if self.votes else (0, 0)
        self.result = (true > 0, true == total, true)
        self.votes.clear()
        self.shares.clear()
        self.arrived = 0
        self.phase += 1
        return True

    def __str__(self) -> str:
        return (
            f"barrier {self.index} in phase {self.phase} ({self.arrived} of {self.expected} threads arrived)"
        )


@dataclass(slots=True)
class ClusterBarrier:
    """The hardware barrier of a cluster (PTX ``barrier.cluster``); threads that exited count as arrived.

    ``expected`` is the number of threads of the cluster.
    """

    expected: int
    arrived: int = 0
    exited: int = 0
    phase: int = 0

    def arrive(self, threads: int) -> bool:
        """Count ``threads`` more; true if that completes the phase."""
        self.arrived += threads
        return self._complete()

    def leave(self, threads: int) -> bool:
        """Count ``threads`` as arrived in this and all later phases; true if that completes the phase."""
        self.exited += threads
        return self._complete()

    def _complete(self) -> bool:
        if not self.arrived or self.arrived + self.exited < self.expected:
            return False
        self.arrived = 0
        self.phase += 1
        return True

    def __str__(self) -> str:
        return (
            f"the cluster barrier in phase {self.phase} ({self.arrived} of {self.expected} threads arrived)"
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a thread waits for that has arrived: the completion of ``phase`` of a barrier."""

    barrier: NamedBarrier | ClusterBarrier
    phase: int

    @property
    def over(self) -> bool:
        """Whether that has happened."""
        return self.barrier.phase > self.phase

    def __str__(self) -> str:
        return str(self.barrier)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What warps wait for that run as one and have arrived at different barriers."""

    each: tuple[Arrival, ...]

    @property
    def over(self) -> bool:
        """Whether all of it has happened."""
        return all(arrival.over for arrival in self.each)

    def __str__(self) -> str:
        return "; ".join(str(arrival) for arrival in self.each if not arrival.over)


@dataclass(frozen=True, slots=True)
class PhaseWait:
    """What a thread waits for that polls an mbarrier; ``wanted`` is a phase or a parity, in words.

    ``seen`` is the phase in which it found the barrier, None if it polls several.
    """

    barrier: Mbarrier
    wanted: str
    seen: int | None = None
    phase: None = None

    @property
    def over(self) -> bool:
        """Whether another poll may find something else."""
        return self.barrier.phase != self.seen

    def __str__(self) -> str:
        phase = self.barrier.phase
        missed = (
            f"; phase {phase - 2} had it, too, and is over" if phase >= 2 and "parity" in self.wanted else ""
        )
        return f"{self.wanted} of {self.barrier}, arrived last: {self.barrier.last}{missed}"


def may_be_over(waiting: object) -> bool:
    """Whether what a thread waits for may have happened; known of barriers, and true of all else."""
    return bool(getattr(waiting, "over", True))


def whole_warps(mask: NDArray[np.bool_]) -> int:
    """The number of warps with a lane in ``mask``."""
    return len(active(mask).warps)
