"""What a step of the differentiating role consists of, whatever the order of its products."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import mma


def take_turn(worker, ends):
    """Of deterministic sums: wait until this CTA may add those of a step."""
    if worker.plan.deterministic:
        ends.granted.wait()
        ends.granted.advance()
    return ends


def give_turn(worker, ends):
    """Of deterministic sums: say that this warp has added those of a step."""
    if worker.plan.deterministic:
        ends.added.signal()
        ends.added.advance()
    return ends


def release_query(worker, ends, pairs: int):
    """Give the slot of Q back that dK has read, when P of so many pairs is known: else ptxas waits for dK
    first.
    """
    ends.query.arrive(after=worker.exponentiated(pairs))
    ends.query.advance()
    return ends


@cute.jit
def start_from_values(worker, ends, first: cutlass.Constexpr[bool]):
    """Issue dV and dP of a step; returns the registers of dP."""
    worker.turn.take(after=worker.exponentiated(worker.pairs))
    slot = ends.dout.wait()
    worker.start_dv(slot, zero=first)
    dprobabilities = worker.start_dprobabilities(slot)
    worker.turn.give()
    return ends, dprobabilities


@cute.jit
def differentiate(worker, ends, dprobabilities, delta: cutlass.Constexpr):
    """Make dS of a step, to be announced, once dV and dP are complete; ``delta`` by pair."""
    mma.wait(0)
    ends.dout.arrive()
    ends.dout.advance()
    worker.differentiate(dprobabilities, delta)
    worker.share(ends.shared.index)
    return ends


@cute.jit
def announce(ends):
    """Say that dS of this warpgroup's keys is where both warpgroups' dQ finds it."""
    cute.arch.fence_view_async_shared()
    ends.shared.signal()
    ends.shared.advance()
    return ends
