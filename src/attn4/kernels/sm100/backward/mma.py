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
from attn4.kernels.shared.gradient_call import COLUMNS


class Products(Fixed):
    """The five products and their operands, of a CTA alone or of a pair; queries by slot.

    ``tiles`` are the operands' in shared memory, by name: of a pair those that two products read come twice,
    split by rows and by columns.
    """

    def __init__(self, plan, dtype, tiles, tensor):
        self.plan = plan
        group = plan.cta_group
        rows, columns = plan.tile_n, plan.tile_m
        if group > 1:
            tiles = {name: with_stride(tile) for name, tile in tiles.items()}
        k_major, mn_major = tcgen05.K_MAJOR, tcgen05.MN_MAJOR

        def product(shape, b_major, a_source, a_major=k_major):
            return tcgen05.shared_product(dtype, shape, b_major, a_source, group, a_major)

        def split_by_columns(name: str):
            return transposed(tiles.get(name + COLUMNS, tiles[name]))

        transposed_scores = product((rows, columns), k_major, tcgen05.SHARED)
        values = product((rows, plan.head_dim_v), mn_major, tcgen05.TENSOR)
        keys = product((rows, plan.head_dim), mn_major, tcgen05.TENSOR)
        queries = product((columns // group, plan.head_dim), mn_major, tcgen05.SHARED, mn_major)
        self.scores_mma = self.dprobabilities_mma = transposed_scores[0]
        self.dv_mma, self.dk_mma, self.dq_mma = values[0], keys[0], queries[0]
        self.key, self.query = operands(transposed_scores, tiles["key"], tiles["query"])
        self.value, self.dout = operands(transposed_scores, tiles["value"], tiles["dout"])
        self.dscores_t, self.key_t = operands(
            queries, transposed(tiles["dscores_shared"]), split_by_columns("key")
        )
        self.dout_t = operand_b(values, split_by_columns("dout"))
        self.query_t = operand_b(keys, split_by_columns("query"))
        self.scores = tensor.accumulator("scores", self.scores_mma)
        self.dprobabilities = tensor.accumulator("dprobabilities", self.dprobabilities_mma)
        self.dv = tensor.accumulator("dv", self.dv_mma)
        self.dk = tensor.accumulator("dk", self.dk_mma)
        self.dq = tensor.accumulator("dq", self.dq_mma)
        self.probabilities = tensor.operand_in_halves("probabilities", self.dv_mma, dtype)
        self.dscores = tensor.operand_in_halves("dscores", self.dk_mma, dtype)

    def start_scores(self, slot, zero=0):
        """Issue S^T = K Q^T, with Q from ``slot``.

        In this and the other products a ``zero`` that no compiler knows makes new descriptors in each step.
        Those that look the same in all are kept in registers, 64 bits an instruction: of a pair too many.
        """
        operands = self.key[None, None, None, zero], self.query[None, None, None, slot]
        tcgen05.issue(self.scores_mma, self.scores, operands, steps(self.plan.head_dim), False)

    def start_dprobabilities(self, zero=0):
        """Issue dP^T = V dO^T."""
        operands = self.value[None, None, None, zero], self.dout[None, None, None, zero]
        tcgen05.issue(
            self.dprobabilities_mma, self.dprobabilities, operands, steps(self.plan.head_dim_v), False
        )

    def add_dv(self, accumulate, zero=0):
        """Issue dV += P^T dO."""
        operands = self.probabilities, self.dout_t[None, None, None, zero]
        tcgen05.issue(self.dv_mma, self.dv, operands, steps(self.plan.tile_m), accumulate)

    def add_dk(self, slot, accumulate):
        """Issue dK += dS^T Q, with Q from ``slot``."""
        operands = self.dscores, self.query_t[None, None, None, slot]
        tcgen05.issue(self.dk_mma, self.dk, operands, steps(self.plan.tile_m), accumulate)

    def start_dq(self, zero=0):
        """Issue dQ = dS K."""
        operands = self.dscores_t[None, None, None, zero], self.key_t[None, None, None, zero]
        depth = self.plan.tile_n * self.plan.cta_group
        tcgen05.issue(self.dq_mma, self.dq, operands, steps(depth), False)


def operands(product, a, b):
    """Fragments of both operands in shared memory of a tiled product, or of one that a pair may share (see
    `tcgen05.shared_product`).
    """
    whole, mine = product if isinstance(product, tuple) else (product, product.get_slice(0))
    return whole.make_fragment_A(mine.partition_A(a)), operand_b(product, b)


def operand_b(product, b):
    """The fragment of operand B."""
    whole, mine = product if isinstance(product, tuple) else (product, product.get_slice(0))
    return whole.make_fragment_B(mine.partition_B(b))


def with_stride(tile):
    """(rows, columns, 1) as if it had another slot behind, so that an index of slots moves the address."""
    layout = cute.make_layout(
        (*tile.shape[:2], 2), stride=(*tile.stride[:2], cute.size(tile, mode=[0]) * cute.size(tile, mode=[1]))
    )
    return cute.make_tensor(tile.iterator, layout)


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
