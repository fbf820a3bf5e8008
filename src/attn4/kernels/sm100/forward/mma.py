"""The multiplying role: one warp issues both products of every query tile.

For each step of keys, in this order for query tile 0 and then 1: O += P V, then the S = Q K^T of the next
step. So the tensor core works for one tile while the softmax of the other runs; and as products complete in
the order of issue, a full S says that the O before it is complete.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import tcgen05, tensor_memory
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.shared.stream import next_tile
from attn4.kernels.shared.tiles import END_OF_WORK


class Products(Fixed):
    """Both products and their operands, each by query tile; keys and values by slot."""

    def __init__(self, plan, dtype, shared, tensor):
        self.plan = plan
        query, key, value_t = shared
        self.scores_mma = tcgen05.tiled_product(
            dtype, (plan.row_tile, plan.tile_n), tcgen05.K_MAJOR, tcgen05.SHARED
        )
        self.output_mma = tcgen05.tiled_product(
            dtype, (plan.row_tile, plan.head_dim_v), tcgen05.MN_MAJOR, tcgen05.TENSOR
        )
        scores, output = self.scores_mma.get_slice(0), self.output_mma.get_slice(0)
        self.query = scores.make_fragment_A(scores.partition_A(query))
        self.key = scores.make_fragment_B(scores.partition_B(key))
        self.value = output.make_fragment_B(output.partition_B(value_t))
        tiles = range(plan.query_tiles)
        self.scores = [tensor.accumulator(f"scores{i}", self.scores_mma) for i in tiles]
        self.output = [tensor.accumulator(f"output{i}", self.output_mma) for i in tiles]
        self.probabilities = [tensor.operand(f"probabilities{i}", self.output_mma, dtype) for i in tiles]

    def start_scores(self, tile: int, key_slot):
        """Issue S = Q K^T of a query tile."""
        # A sign that is never set: descriptors of Q that looked the same in every step would be kept in
        # registers, 64 bits for each instruction, and spilled.
        query_slot = tile + (key_slot >> 31)
        operands = self.query[None, None, None, query_slot], self.key[None, None, None, key_slot]
        steps = (self.plan.head_dim // tcgen05.STEP,)
        tcgen05.issue(self.scores_mma, self.scores[tile], operands, steps, False)

    def start_output(self, tile: int, value_slot, steps, accumulate):
        """Issue O += P V of a query tile for some steps of 16 keys."""
        operands = self.probabilities[tile], self.value[None, None, None, value_slot]
        tcgen05.issue(self.output_mma, self.output[tile], operands, steps, accumulate)


@cute.jit
def multiply(stream, products, ends):
    """Follow the tiles."""
    stream, tile = next_tile(stream)
    while tile.row_block != END_OF_WORK:
        if tile.n_begin < tile.n_end:
            ends = first_scores(products, ends)
            accumulate = cutlass.Boolean(False)
            for _ in cutlass.range(tile.n_end - tile.n_begin - 1, unroll=1):
                ends = step(products, ends, accumulate, last=False)
                accumulate = cutlass.Boolean(True)
            ends = step(products, ends, accumulate, last=True)
        elif cutlass.const_expr(products.plan.output_in_query):
            for _ in cutlass.range_constexpr(products.plan.query_tiles):
                ends.query.wait()
                ends.query.arrive()
                ends.query.advance()
        stream, tile = next_tile(stream)


@cute.jit
def first_scores(products, ends):
    """S of the first step, of every query tile."""
    key_slot = ends.ring("key").wait()
    for i in cutlass.range_constexpr(products.plan.query_tiles):
        ends.query.wait()
        products.start_scores(i, key_slot)
        ends.of("scores", i).commit()
        ends.of("scores", i).advance()
        ends.query.advance()
    ends.ring("key").release(key_slot)
    ends.ring("key").advance()
    return ends


@cute.jit
def step(products, ends, accumulate, last: cutlass.Constexpr[bool]):
    """O += P V of this step and S of the next, of every query tile."""
    tiles = products.plan.query_tiles
    value_slot = ends.ring("value").wait()
    ends.ring("value").advance()
    key_slot = value_slot
    for i in cutlass.range_constexpr(tiles):
        ends = add_values(products, ends, i, value_slot, accumulate)
        if cutlass.const_expr(i == tiles - 1):
            ends.ring("value").release(value_slot)
        if cutlass.const_expr(last):
            ends.of("output", i).commit()
            ends.of("output", i).advance()
        else:
            if cutlass.const_expr(i == 0):
                key_slot = ends.ring("key").wait()
            products.start_scores(i, key_slot)
            ends.of("scores", i).commit()
            ends.of("scores", i).advance()
    if cutlass.const_expr(last):
        for i in cutlass.range_constexpr(tiles):
            ends.query.release(i)
    else:
        ends.ring("key").release(key_slot)
        ends.ring("key").advance()
    return ends


@cute.jit
def add_values(products, ends, i: cutlass.Constexpr[int], value_slot, accumulate):
    """O += P V of query tile ``i``: most of it as soon as most of P is there."""
    plan = products.plan
    all_steps = plan.tile_n // tcgen05.STEP
    early = all_steps - plan.late_keys // tcgen05.STEP
    ends.of("rescaled", i).wait()
    ends.of("probabilities", i).wait()
    tensor_memory.after_wait()
    products.start_output(i, value_slot, (0, early), accumulate)
    if cutlass.const_expr(early < all_steps):
        ends.of("late", i).wait()
        tensor_memory.after_wait()
        products.start_output(i, value_slot, (early, all_steps), accumulate)
        ends.of("late", i).advance()
    ends.of("rescaled", i).advance()
    ends.of("probabilities", i).advance()
    return ends
