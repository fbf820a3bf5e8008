"""A step whose products begin with the next S: S, the last dQ and dK; then dV and dP.

Loads of shared memory, waits at barriers and fences stand in a queue behind the products that their warp has
issued, until the last of these has gone to the tensor core. So all of them that are needed beside products
come first: statistics are in registers by then, and dS of the step before has been handed over.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import mma
from attn4.kernels.sm90.backward.elements import Statistics
from attn4.kernels.sm90.backward.steps import (
    announce,
    differentiate,
    give_turn,
    release_query,
    start_from_values,
    take_turn,
)


@cute.jit
def begin(worker, walk, ends):
    """S, P, dV, dP and dS of the first step; that of the one before it has been announced."""
    lse = Statistics(worker.elements, 0, ends.row_stats.wait()).loaded()
    key_slot = ends.key.wait()
    ends.value.wait()
    query_slot = ends.ahead.wait()
    worker.turn.take()
    scores = worker.start_scores(key_slot, query_slot)
    worker.turn.give()
    mma.wait(0)
    ends = exponentiate(worker, walk, ends, scores, lse)
    return differentiate_scores(worker, ends, first=True)


@cute.jit
def step(worker, walk, before, sums, ends):
    """Of the step ``walk`` dK, of the one ``before`` it dQ, and of the next S, P, dV, dP and dS."""
    lse = Statistics(worker.elements, 0, ends.row_stats.wait()).loaded()
    query_slot = ends.ahead.wait()
    ends = announce(ends)
    dscores_slot = ends.dscores.wait()
    worker.turn.take()
    scores = worker.start_scores(ends.key.index, query_slot)
    dq = worker.start_dq(dscores_slot, ends.key.index)
    worker.start_dk(ends.query.index)
    worker.turn.give()
    ends.dscores.advance()
    following = walk.following()
    ends = take_turn(worker, ends)
    mma.wait(1)
    ends = exponentiate(worker, following, ends, scores, lse, (sums, dq, before))
    ends = give_turn(worker, ends)
    mma.wait(0)
    ends = release_query(worker, ends, worker.pairs)
    ends = differentiate_scores(worker, ends, first=False)
    return following, walk, ends


@cute.jit
def last(worker, ends):
    """Issue dK of the last step and dQ of the last but one; returns the registers of dQ."""
    ends = announce(ends)
    dscores_slot = ends.dscores.wait()
    worker.turn.take()
    worker.start_dk(ends.query.index)
    dq = worker.start_dq(dscores_slot, ends.key.index)
    worker.turn.give()
    return ends, dq


@cute.jit
def exponentiate(worker, walk, ends, scores, lse: cutlass.Constexpr, begun: cutlass.Constexpr = None):
    """P of a step from its scores, which are complete.

    Beside it a dQ that has ``begun`` leaves, (sums, registers, walk): a warp can issue additions much faster
    than they leave, and would only wait.
    """
    worker.elements.hide(scores, walk)
    for pair in cutlass.range_constexpr(worker.pairs):
        worker.exponentiate(scores, pair, lse[pair])
        if cutlass.const_expr(begun is not None):
            sums, *what = begun
            sums.add(*what, pair, worker.pairs)
    ends.ahead.advance()
    return ends


@cute.jit
def differentiate_scores(worker, ends, first: cutlass.Constexpr[bool]):
    """Of a step whose P is made dV, dP and dS, which the next step hands over."""
    delta = Statistics(worker.elements, 1, ends.row_stats.index).loaded()
    ends.row_stats.arrive_together()
    ends.row_stats.advance()
    ends, dprobabilities = start_from_values(worker, ends, first)
    return differentiate(worker, ends, dprobabilities, delta)
