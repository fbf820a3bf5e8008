"""The multiplying role: one warp issues the five products of every step.

In this order: S^T of step j, dK and dQ of step j - 1, dP^T and dV of step j. So the tensor core works on the
step before while the softmax of this one runs, and nothing has a product for its only company. As products
complete in the order of issue, a full S says that dV no longer reads the P in its columns, and a full dP that
dK and dQ no longer read dS.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import tcgen05, tensor_memory
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.smem import transposed


class Products(Fixed):
    """The five products and their operands; queries by slot."""

    def __init__(self, plan, dtype, shared, tensor):
        self.plan = plan
        rows, columns = plan.tile_n, plan.tile_m
        key, value, query, dout, dscores = shared
        k_major, mn_major = tcgen05.K_MAJOR, tcgen05.MN_MAJOR
        transposed_scores = tcgen05.tiled_product(dtype, (rows, columns), k_major, tcgen05.SHARED)
        self.scores_mma = self.dprobabilities_mma = transposed_scores
        self.dv_mma = tcgen05.tiled_product(dtype, (rows, plan.head_dim_v), mn_major, tcgen05.TENSOR)
        self.dk_mma = tcgen05.tiled_product(dtype, (rows, plan.head_dim), mn_major, tcgen05.TENSOR)
        self.dq_mma = tcgen05.tiled_product(
            dtype, (columns, plan.head_dim), mn_major, tcgen05.SHARED, a_major=mn_major
        )
        self.key, self.query = operands(self.scores_mma, key, query)
        self.value, self.dout = operands(self.dprobabilities_mma, value, dout)
        self.dscores_t, self.key_t = operands(self.dq_mma, transposed(dscores), transposed(key))
        self.dout_t = operand_b(self.dv_mma, transposed(dout))
        self.query_t = operand_b(self.dk_mma, transposed(query))
        self.scores = tensor.accumulator("scores", self.scores_mma)
        self.dprobabilities = tensor.accumulator("dprobabilities", self.dprobabilities_mma)
        self.dv = tensor.accumulator("dv", self.dv_mma)
        self.dk = tensor.accumulator("dk", self.dk_mma)
        self.dq = tensor.accumulator("dq", self.dq_mma)
        self.probabilities = tensor.operand_in_halves("probabilities", self.dv_mma, dtype)
        self.dscores = tensor.operand_in_halves("dscores", self.dk_mma, dtype)

    def start_scores(self, slot):
        """Issue S^T = K Q^T."""
        operands = self.key[None, None, None, 0], self.query[None, None, None, slot]
        tcgen05.issue(self.scores_mma, self.scores, operands, steps(self.plan.head_dim), False)

    def start_dprobabilities(self):
        """Issue dP^T = V dO^T."""
        operands = self.value[None, None, None, 0], self.dout[None, None, None, 0]
        tcgen05.issue(
            self.dprobabilities_mma, self.dprobabilities, operands, steps(self.plan.head_dim_v), False
        )

    def add_dv(self, accumulate):
        """Issue dV += P^T dO."""
        operands = self.probabilities, self.dout_t[None, None, None, 0]
        tcgen05.issue(self.dv_mma, self.dv, operands, steps(self.plan.tile_m), accumulate)

    def add_dk(self, slot, accumulate):
        """Issue dK += dS^T Q."""
        operands = self.dscores, self.query_t[None, None, None, slot]
        tcgen05.issue(self.dk_mma, self.dk, operands, steps(self.plan.tile_m), accumulate)

    def start_dq(self):
        """Issue dQ = dS K, over the dS in tensor memory, which dK has read by then."""
        operands = self.dscores_t[None, None, None, 0], self.key_t[None, None, None, 0]
        tcgen05.issue(self.dq_mma, self.dq, operands, steps(self.plan.tile_n), False)


def operands(tiled_mma, a, b):
    """Fragments of both operands in shared memory."""
    mine = tiled_mma.get_slice(0)
    return mine.make_fragment_A(mine.partition_A(a)), operand_b(tiled_mma, b)


def operand_b(tiled_mma, b):
    """The fragment of operand B."""
    mine = tiled_mma.get_slice(0)
    return mine.make_fragment_B(mine.partition_B(b))


def steps(depth: int) -> tuple[int]:
    """Instructions of an inner dimension."""
    return (depth // tcgen05.STEP,)


@cute.jit
def multiply(count, products, ends):
    """The products of ``count`` steps."""
    if count > 0:
        ends.key.wait()
        ends = scores(products, ends)
        ends.value.wait()
        ends = dprobabilities(products, ends)
        ends = values(products, ends, False)
        accumulate = cutlass.Boolean(False)
        for _ in cutlass.range(count - 1, unroll=1):
            ends = scores(products, ends)
            ends = keys_and_queries(products, ends, accumulate)
            accumulate = cutlass.Boolean(True)
            ends = dprobabilities(products, ends)
            ends = values(products, ends, True)
        ends.dv.commit()
        ends = keys_and_queries(products, ends, accumulate)
        ends.dk.commit()


@cute.jit
def scores(products, ends):
    """S^T of a step."""
    slot = ends.query.wait()
    ends.query.advance()
    products.start_scores(slot)
    ends.scores.commit()
    ends.scores.advance()
    return ends


@cute.jit
def dprobabilities(products, ends):
    """dP^T of a step, in the columns that dQ of the step before has left."""
    ends.dout.wait()
    ends.dq.acquire()
    tensor_memory.after_wait()
    products.start_dprobabilities()
    ends.dprobabilities.commit()
    ends.dprobabilities.advance()
    return ends


@cute.jit
def values(products, ends, accumulate):
    """Add up dV of a step."""
    ends.probabilities.wait()
    ends.probabilities.advance()
    tensor_memory.after_wait()
    products.add_dv(accumulate)
    ends.dout.release(0)
    ends.dout.advance()
    return ends


@cute.jit
def keys_and_queries(products, ends, accumulate):
    """Add up dK, and start dQ, of the step before."""
    ends.dscores.wait()
    ends.dscores.advance()
    tensor_memory.after_wait()
    products.add_dk(ends.used_query.index, accumulate)
    ends.used_query.release(ends.used_query.index)
    ends.used_query.advance()
    products.start_dq()
    ends.dq.commit()
    ends.dq.advance()
    return ends
