"""A step whose products begin with dK: dK, the next S and the last dQ; then dV and dP.

dQ is complete last, and leaves beside the second half of the exponentials. A slot of Q comes back before.
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
    key_slot = ends.key.wait()
    ends.value.wait()
    worker.turn.take()
    scores = worker.start_scores(key_slot, ends.ahead.wait())
    worker.turn.give()
    ends = exponentiate(worker, walk, ends, scores)
    return differentiate_scores(worker, ends, first=True)


@cute.jit
def step(worker, walk, before, sums, ends):
    """Of the step ``walk`` dK, of the one ``before`` it dQ, and of the next S, P, dV, dP and dS."""
    worker.turn.take()
    worker.start_dk(ends.query.index)
    scores = worker.start_scores(ends.key.index, ends.ahead.wait())
    dq = worker.start_dq(ends.dscores.wait(), ends.key.index)
    worker.turn.give()
    ends.dscores.advance()
    following = walk.following()
    ends = exponentiate(worker, following, ends, scores, (sums, dq, before))
    ends = differentiate_scores(worker, ends, first=False)
    return following, walk, ends


@cute.jit
def last(worker, ends):
    """Issue dK of the last step and dQ of the last but one; returns the registers of dQ."""
    worker.turn.take()
    worker.start_dk(ends.query.index)
    dq = worker.start_dq(ends.dscores.wait(), ends.key.index)
    worker.turn.give()
    return ends, dq


@cute.jit
def exponentiate(worker, walk, ends, scores, begun: cutlass.Constexpr = None):
    """P of a step from its scores, when dK of the step before is complete as well.

    Beside its second half a dQ that has ``begun`` leaves, (sums, registers, walk): a warp can issue additions
    much faster than they leave, and would only wait.
    """
    lse = Statistics(worker.elements, 0, ends.row_stats.wait())
    mma.wait(0 if begun is None else 1)
    worker.elements.hide(scores, walk)
    for pair in cutlass.range_constexpr(worker.pairs):
        part = pair - worker.pairs // 2
        if cutlass.const_expr(begun is not None and part == 0):
            ends = release_query(worker, ends, pair)
            ends = take_turn(worker, ends)
            mma.wait(0)
        worker.exponentiate(scores, pair, lse[pair])
        if cutlass.const_expr(begun is not None and part >= 0):
            sums, *what = begun
            sums.add(*what, part, worker.pairs - worker.pairs // 2)
    if cutlass.const_expr(begun is not None):
        ends = give_turn(worker, ends)
    ends.ahead.advance()
    return ends


@cute.jit
def differentiate_scores(worker, ends, first: cutlass.Constexpr[bool]):
    """Of a step whose P is made dV, dP and dS, which is handed over at once."""
    ends, dprobabilities = start_from_values(worker, ends, first)
    delta = Statistics(worker.elements, 1, ends.row_stats.index)
    ends = differentiate(worker, ends, dprobabilities, delta)
    ends.row_stats.advance()
    return announce(ends)
