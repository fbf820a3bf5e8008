"""Rings of shared-memory slots with their barriers: the only file that computes an index or a phase bit."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects.nvvm import MemScopeKind

from attn4.kernels.dsl.carried import Carried, Fixed


class Ring(Fixed):
    """The barriers of one channel: ``stages`` full ones from ``barriers`` on, then as many empty ones.

    A channel without empty arrivals has no empty barriers: its slot comes back with another channel.
    ``number`` counts the CTA's barriers before it. ``pair``: the CTAs that it connects; ``returns``: those
    to whose leader a slot comes back.
    """

    def __init__(self, channel, barriers, number: int, pair, returns):
        self.channel = channel
        self.barriers = barriers
        self.number = number
        self.pair = pair
        self.returns = returns

    def beside(self, other: Ring, tile):
        """This ring for a ``tile`` of 0 and ``other``, whose counts are the same, for 1."""
        barriers = self.barriers + tile * (other.number - self.number)
        return Ring(self.channel, barriers, self.number, self.pair, self.returns)

    def initialise(self):
        """Set the arrive counts that the plan declares; by one thread, before any other use."""
        stages = self.channel.stages
        for stage in range(stages):
            cute.arch.mbarrier_init(self.barriers + stage, self.channel.full_arrivals)
            if self.channel.empty_arrivals:
                cute.arch.mbarrier_init(self.barriers + stages + stage, self.channel.empty_arrivals)

    def full(self, index):
        """The barrier that says slot ``index`` holds data."""
        return self.barriers + index

    def empty(self, index):
        """The barrier that says slot ``index`` may be overwritten."""
        return self.barriers + self.channel.stages + index


@cute.jit
def initialise(rings):
    """Set up the barriers of all ``rings``, by name; by one warp, before a barrier of the CTA."""
    with cute.arch.elect_one():
        for ring in rings.values():
            ring.initialise()
    cute.arch.mbarrier_init_fence()


class End(Carried):
    """One side of a ring: which slot comes next, and in which phase of its barriers."""

    carried = ("index", "phase")

    def __init__(self, ring: Ring):
        self.ring = ring
        self.index = Int32(0)
        self.phase = Int32(0)

    def advance(self):
        """Move to the next slot."""
        stages = self.ring.channel.stages
        following = self.index + 1
        if stages & (stages - 1):
            wrap = Int32(following == stages)
            self.index = following - wrap * stages
        else:
            # Shifts and masks: a signed division costs nine instructions a step more.
            wrap = following >> (stages.bit_length() - 1)
            self.index = following & (stages - 1)
        self.phase = self.phase ^ wrap


class Producer(End):
    """The side that fills slots."""

    def acquire(self):
        """Wait until the next slot is free, if that is for this channel to say; returns its index."""
        if self.ring.channel.empty_arrivals:
            cute.arch.mbarrier_wait(self.ring.empty(self.index), self.phase ^ 1)
        return self.index

    @property
    def barrier(self):
        """The barrier on which a copy engine reports the bytes of the acquired slot."""
        return self.ring.full(self.index)

    @cute.jit
    def expect(self):
        """Announce the bytes that the copies into the acquired slot will report, of a pair those of both; by
        one warp.
        """
        if self.ring.pair.leads(True):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(self.barrier, self.ring.channel.transaction_bytes)

    def send(self, rows, tiles, index):
        """Copy tile ``index`` of ``rows`` into the next free slot; by one warp."""
        slot = self.acquire()
        self.expect()
        rows.copy(tiles, index, slot, self.barrier)
        self.advance()

    @cute.jit
    def skip(self):
        """Pass the acquired slot on without data."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barrier)

    @cute.jit
    def signal(self):
        """Hand over a slot that this warp filled with ordinary stores."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.ring.pair.arrive(self.barrier)

    @cute.jit
    def signal_own(self):
        """Hand over this CTA's part of a slot; the other CTAs of the cluster copy theirs into it."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            channel = self.ring.channel
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.barrier, channel.transaction_bytes // channel.full_arrivals
            )

    @cute.jit
    def publish(self):
        """As ``signal``, of shared memory of either CTA of a pair."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.ring.pair.arrive(self.barrier, MemScopeKind.CLUSTER)

    @cute.jit
    def commit(self):
        """Hand over a slot when the products that this warp has issued are complete."""
        with cute.arch.elect_one():
            self.ring.pair.commit(self.barrier)

    @cute.jit
    def drain(self):
        """Wait until all slots have come back."""
        for _ in cutlass.range_constexpr(self.ring.channel.stages):
            self.acquire()
            self.advance()


class Consumer(End):
    """The side that reads slots."""

    def wait(self):
        """Wait until the next slot holds data; returns its index."""
        cute.arch.mbarrier_wait(self.ring.full(self.index), self.phase)
        return self.index

    @cute.jit
    def arrive(self, after=0):
        """This warp has read the slot, if that is for this channel to say; not before ``after``, a zero, is
        known.
        """
        if cutlass.const_expr(self.ring.channel.empty_arrivals == 0):
            return
        if cutlass.const_expr(self.ring.channel.ctas > 1):
            lane = cute.arch.lane_idx()
            if lane < self.ring.channel.ctas:
                cute.arch.mbarrier_arrive(self.ring.empty(self.index) + after, lane)
        else:
            with cute.arch.elect_one():
                self.ring.returns.arrive(self.ring.empty(self.index) + after)

    @cute.jit
    def arrive_together(self):
        """All lanes of this warp have read the slot."""
        cute.arch.sync_warp()
        self.arrive()

    @cute.jit
    def announce(self):
        """Say how many bytes the peer will send; by one warp."""
        with cute.arch.elect_one():
            count = self.ring.channel.transaction_bytes
            cute.arch.mbarrier_arrive_and_expect_tx(self.ring.full(self.index), count)

    @cute.jit
    def release(self, slot):
        """Give ``slot`` back when the products that this warp has issued are complete."""
        with cute.arch.elect_one():
            self.ring.pair.commit(self.ring.empty(slot))


class Turn(Fixed):
    """Warpgroups take turns: each waits for its own named barrier, which the one before it completes."""

    FIRST_BARRIER = 1

    def __init__(self, channel, group):
        self.channel = channel
        self.group = group

    @classmethod
    def of(cls, plan, group):
        """The turns of warpgroup ``group`` that ``plan`` declares; of none, if it declares none."""
        return cls(next((channel for channel in plan.channels if channel.name == "turn"), None), group)

    @cute.jit
    def open(self):
        """Give the first warpgroup its first turn; called by all."""
        if cutlass.const_expr(self.channel is not None):
            if self.group == self.channel.stages - 1:
                self._arrive(Int32(0))

    @cute.jit
    def take(self, after=0):
        """Wait for this warpgroup's turn; not before ``after``, a zero, is known."""
        if cutlass.const_expr(self.channel is not None):
            self._wait(self.group + after)

    @cute.jit
    def give(self):
        """Give the turn to the next warpgroup."""
        if cutlass.const_expr(self.channel is not None):
            following = self.group + 1
            self._arrive(following - following // self.channel.stages * self.channel.stages)

    @cute.jit
    def close(self):
        """Take the last turn that was given, so that no barrier is left half complete."""
        if cutlass.const_expr(self.channel is not None):
            if self.group == 0:
                self._wait(Int32(0))

    def _wait(self, group):
        cute.arch.barrier(barrier_id=self.FIRST_BARRIER + group, number_of_threads=self.channel.full_arrivals)

    def _arrive(self, group):
        cute.arch.barrier_arrive(
            barrier_id=self.FIRST_BARRIER + group, number_of_threads=self.channel.full_arrivals
        )
