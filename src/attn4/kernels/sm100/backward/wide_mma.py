"""The multiplying role where dQ is transposed: one warp issues the products of every step.

In this order: dP^T of step j, the last part of dQ^T of step j - 1, dV of step j, S^T of step j + 1, dK of
step j, other parts of its dQ^T. So the tensor core has S while dS of a step is computed. As products complete
in the order of issue, a full S says that dV no longer reads the P in its columns, and a full dP that dK no
longer reads the dS in its.
"""

from __future__ import annotations

import copy

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import tcgen05, tensor_memory
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.smem import transposed
from attn4.kernels.sm100.backward.mma import operand_b, operands, steps

LOG2_MOST_STEPS = 30
"""The number of a step has no bits from here on, which the compiler does not know."""


class Products(Fixed):
    """The products and their operands; of queries by slot, of values by part, this CTA's columns first. The
    other CTA's columns of K are operand A in tensor memory.

    ``shared`` are tiles in shared memory by name, "dq_keys" those columns of K that each part of dQ takes.
    """

    def __init__(self, plan, dtype, shared, tensor):
        self.plan = plan
        self.shares = plan.column_shares
        self.zero = 0
        rows, queries = plan.tile_n, plan.tile_m
        self.columns, self.columns_v = plan.head_dim // self.shares, plan.head_dim_v // self.shares
        k_major, mn_major = tcgen05.K_MAJOR, tcgen05.MN_MAJOR
        self.scores_mma = tcgen05.tiled_product(dtype, (rows, queries), k_major, tcgen05.SHARED)
        self.dv_mma = tcgen05.tiled_product(dtype, (rows, self.columns_v), mn_major, tcgen05.TENSOR)
        self.dk_mma = tcgen05.tiled_product(dtype, (rows, self.columns), mn_major, tcgen05.TENSOR)
        self.dq_mma = tcgen05.tiled_product(
            dtype, (tensor_memory.LANES, queries), mn_major, tcgen05.SHARED, a_major=mn_major
        )
        self.key, self.query = operands(self.scores_mma, shared["key"], shared["query"])
        self.value, self.dout = operands(self.scores_mma, shared["value"], shared["dout"])
        self.dscores_t = operand_b(self.dq_mma, transposed(shared["dscores_shared"]))
        self.keys_t = [operand_a(self.dq_mma, transposed(keys)) for keys in shared["dq_keys"]]
        self.dout_t = operand_b(self.dv_mma, transposed(shared["dout"]))
        self.query_t = operand_b(self.dk_mma, transposed(shared["query"]))
        self.scores = tensor.accumulator("scores", self.scores_mma)
        self.dprobabilities = tensor.accumulator("dprobabilities", self.scores_mma)
        self.dv = tensor.accumulator("dv", self.dv_mma)
        self.dk = tensor.accumulator("dk", self.dk_mma)
        self.dq = tensor.accumulator("dq", self.dq_mma)
        self.probabilities = tensor.operand_in_halves("probabilities", self.dv_mma, dtype)
        self.dscores = tensor.operand_in_halves("dscores", self.dk_mma, dtype)
        if self.shares > 1:
            self.kept_mma = tcgen05.tiled_product(dtype, (rows, queries), k_major, tcgen05.TENSOR)
            self.kept = tensor.operand("kept_keys", self.kept_mma, dtype)

    def of_step(self, step):
        """These products, of which no descriptor outlives a step: ptxas would keep those that depend on
        constants alone, and spill them.
        """
        mine = copy.copy(self)
        mine.zero = step >> LOG2_MOST_STEPS
        return mine

    def slot(self, operand, number):
        """A slot of the fragments of an operand."""
        return operand[None, None, None, number + self.zero]

    def add_scores(self, part: int, slot):
        """Issue a part of S^T = K Q^T; the other CTA's columns come first."""
        query = self.slot(self.query, slot)
        if part < self.shares - 1:
            tcgen05.issue(self.kept_mma, self.scores, (self.kept, query), steps(self.columns), False)
        else:
            operands = self.slot(self.key, 0), query
            tcgen05.issue(self.scores_mma, self.scores, operands, steps(self.columns), part > 0)

    def add_dprobabilities(self, part: int, slot):
        """Issue a part of dP^T = V dO^T, as of S^T."""
        operands = self.slot(self.value, self.shares - 1 - part), self.slot(self.dout, slot)
        tcgen05.issue(self.scores_mma, self.dprobabilities, operands, steps(self.columns_v), part > 0)

    def add_dv(self, slot, accumulate):
        """Issue dV += P^T dO."""
        operands = self.probabilities, self.slot(self.dout_t, slot)
        tcgen05.issue(self.dv_mma, self.dv, operands, steps(self.plan.tile_m), accumulate)

    def add_dk(self, slot, accumulate):
        """Issue dK += dS^T Q."""
        operands = self.dscores, self.slot(self.query_t, slot)
        tcgen05.issue(self.dk_mma, self.dk, operands, steps(self.plan.tile_m), accumulate)

    def start_dq(self, part: int):
        """Issue a part of dQ^T = K^T dS^T."""
        operands = self.slot(self.keys_t[part], 0), self.slot(self.dscores_t, 0)
        tcgen05.issue(self.dq_mma, self.dq, operands, steps(self.plan.tile_n), False)


def operand_a(tiled_mma, a):
    """The fragment of operand A."""
    mine = tiled_mma.get_slice(0)
    return mine.make_fragment_A(mine.partition_A(a))


@cute.jit
def multiply(count, products, ends):
    """The products of ``count`` steps."""
    if count > 0:
        for _ in cutlass.range_constexpr(products.shares):
            ends.value.wait()
            ends.value.advance()
        ends.key.wait()
        if cutlass.const_expr(products.shares > 1):
            ends.kept_keys.wait()
            tensor_memory.after_wait()
        ends = scores(products, ends)
        accumulate = cutlass.Boolean(False)
        for step in cutlass.range(count, unroll=1):
            mine = products.of_step(step)
            ends, dout = dprobabilities(mine, ends)
            if accumulate:
                ends = last_queries(mine, ends)
            ends = values(mine, ends, dout, accumulate)
            if step + 1 < count:
                ends = scores(mine, ends)
            else:
                ends.dv.commit()
            ends = keys(mine, ends, accumulate)
            accumulate = cutlass.Boolean(True)
        ends.dk.commit()
        ends = last_queries(products, ends)


@cute.jit
def dprobabilities(products, ends):
    """dP^T of a step; gives the slot of this CTA's columns of dO, too, which dV needs."""
    own = products.shares - 1
    for part in cutlass.range_constexpr(products.shares):
        slot = ends.dout.wait()
        products.add_dprobabilities(part, slot)
        if cutlass.const_expr(part < own):
            ends.dout.release(slot)
        ends.dout.advance()
    ends.dprobabilities.commit()
    ends.dprobabilities.advance()
    return ends, slot


@cute.jit
def scores(products, ends):
    """S^T of a step; this CTA's columns of Q, the last ones, are kept for dK."""
    own = products.shares - 1
    for part in cutlass.range_constexpr(products.shares):
        slot = ends.query.wait()
        products.add_scores(part, slot)
        if cutlass.const_expr(part < own):
            ends.query.release(slot)
        ends.query.advance()
    ends.scores.commit()
    ends.scores.advance()
    return ends


@cute.jit
def values(products, ends, slot, accumulate):
    """Add up dV of a step."""
    ends.probabilities.wait()
    ends.probabilities.advance()
    tensor_memory.after_wait()
    products.add_dv(slot, accumulate)
    ends.dout.release(slot)
    return ends


@cute.jit
def keys(products, ends, accumulate):
    """Add up dK of a step, and start all parts of dQ but the last."""
    ends.dscores.wait()
    tensor_memory.after_wait()
    for _ in cutlass.range_constexpr(products.shares - 1):
        ends.used_query.advance()
    slot = ends.used_query.index
    products.add_dk(slot, accumulate)
    ends.used_query.release(slot)
    ends.used_query.advance()
    for part in cutlass.range_constexpr(len(products.keys_t) - 1):
        ends = queries(products, ends, part)
    return ends


@cute.jit
def last_queries(products, ends):
    """Start the last part of dQ of the step before, and give its dS back."""
    ends = queries(products, ends, len(products.keys_t) - 1)
    ends.dscores.release(0)
    ends.dscores.advance()
    return ends


@cute.jit
def queries(products, ends, part: cutlass.Constexpr[int]):
    """A part of dQ, in the columns that the part before has left."""
    ends.dq.acquire()
    tensor_memory.after_wait()
    products.start_dq(part)
    ends.dq.commit()
    ends.dq.advance()
    return ends
