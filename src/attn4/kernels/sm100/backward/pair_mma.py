"""The multiplying role of a pair of CTAs: one warp of the leader issues the five products of every step.

dQ of step j - 1 needs dS of both CTAs, which takes its time, and lies in the columns of S, beside P. So it
comes after P of step j is there, which says that S has been read; and the next S after dQ has been read. The
order of a step is S^T, dK of the step before, then either dP^T and dQ of the step before (so that dQ waits
least for the other CTA), or dQ and dP^T (as the FlashAttention-4 post has it), then dV.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import math, tensor_memory


@cute.jit
def multiply_in_pair(count, products, ends):
    """The products of ``count`` steps."""
    if count > 0:
        ends.key.wait()
        ends = scores(products, ends)
        ends.value.wait()
        ends = dprobabilities(products, ends)
        ends = values(products, ends, False)
        ends.key_columns.wait()
        accumulate = cutlass.Boolean(False)
        for _ in cutlass.range(count - 1, unroll=1):
            # dQ of two steps ago lies where this S comes.
            ends.dq.acquire()
            tensor_memory.after_wait()
            ends = scores(products, ends)
            ends = keys(products, ends, accumulate)
            accumulate = cutlass.Boolean(True)
            if cutlass.const_expr(not products.plan.dq_first):
                ends = dprobabilities(products, ends)
            # P is where S was: S has been read.
            ends.probabilities.wait()
            ends = queries(products, ends)
            if cutlass.const_expr(products.plan.dq_first):
                ends = dprobabilities(products, ends)
            ends = values(products, ends, True)
        ends.dv.commit()
        ends = keys(products, ends, accumulate)
        ends.dk.commit()
        ends.dq.acquire()
        ends = queries(products, ends)


@cute.jit
def scores(products, ends):
    """S^T of a step."""
    ends.query.wait()
    zero = math.zero_of(ends.query.phase)
    products.start_scores(zero, zero)
    ends.query.release(0)
    ends.query.advance()
    ends.scores.commit()
    ends.scores.advance()
    return ends


@cute.jit
def dprobabilities(products, ends):
    """dP^T of a step."""
    ends.dout.wait()
    products.start_dprobabilities(math.zero_of(ends.dout.phase))
    ends.dout.release(0)
    ends.dout.advance()
    ends.dprobabilities.commit()
    ends.dprobabilities.advance()
    return ends


@cute.jit
def values(products, ends, accumulate):
    """Add up dV of a step."""
    ends.dout_columns.wait()
    ends.probabilities.wait()
    ends.probabilities.advance()
    tensor_memory.after_wait()
    products.add_dv(accumulate, math.zero_of(ends.dout_columns.phase))
    ends.dout_columns.release(0)
    ends.dout_columns.advance()
    return ends


@cute.jit
def keys(products, ends, accumulate):
    """Add up dK of the step before."""
    ends.query_columns.wait()
    ends.dscores.wait()
    ends.dscores.advance()
    tensor_memory.after_wait()
    products.add_dk(math.zero_of(ends.query_columns.phase), accumulate)
    ends.query_columns.release(0)
    ends.query_columns.advance()
    return ends


@cute.jit
def queries(products, ends):
    """Start dQ of the step before, when both CTAs have dS of all keys."""
    ends.dscores_whole.wait()
    tensor_memory.after_wait()
    products.start_dq(math.zero_of(ends.dscores_whole.phase))
    ends.dscores_whole.advance()
    ends.dscores.release(0)
    ends.dq.commit()
    ends.dq.advance()
    return ends
