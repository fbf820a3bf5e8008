"""The multiplying role: one warp issues both products of every query tile.

For each step of keys, in this order for query tile 0 and then 1: O += P V, then the S = Q K^T that takes the
place of the S that P came from: of the next step, or of the one after it where a query tile has two slots of
scores. So the tensor core works for one tile, or slot, while the softmax of the other runs.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import math, tcgen05, tensor_memory
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.shared.stream import next_tile
from attn4.kernels.shared.tiles import END_OF_WORK


class Products(Fixed):
    """Both products and their operands, each by query tile; keys and values by slot."""

    def __init__(self, plan, dtype, shared, tensor):
        self.plan = plan
        query, key, value_t = shared
        scores = (dtype, (plan.row_tile, plan.tile_n), tcgen05.K_MAJOR, tcgen05.SHARED)
        output = (dtype, (plan.row_tile, plan.head_dim_v), tcgen05.MN_MAJOR, tcgen05.TENSOR)
        self.scores_mma, mine = tcgen05.shared_product(*scores, plan.cta_group)
        self.query = self.scores_mma.make_fragment_A(mine.partition_A(query))
        self.key = self.scores_mma.make_fragment_B(mine.partition_B(key))
        self.output_mma, mine = tcgen05.shared_product(*output, plan.cta_group)
        self.value = self.output_mma.make_fragment_B(mine.partition_B(value_t))
        tiles = range(plan.query_tiles)
        self.output = [tensor.accumulator(f"output{i}", self.output_mma) for i in tiles]
        self.dtype = dtype
        self.tensor = tensor

    def start_scores(self, tile: int, slots, zero):
        """Issue S = Q K^T of a query tile; ``slots`` are those of S and K.

        ``zero``, which no compiler knows, makes new descriptors of each use of a slot: those that look the
        same in every step, or for both query tiles, are kept in registers, 64 bits an instruction, and
        spilled.
        """
        slot, key_slot = slots
        query = self.query[None, None, None, tile + zero]
        operands = query, self.key[None, None, None, key_slot + zero]
        steps = (self.plan.head_dim // tcgen05.STEP,)
        scores = self.tensor.accumulator(f"scores{tile}", self.scores_mma, slot)
        tcgen05.issue(self.scores_mma, scores, operands, steps, False)

    def start_output(self, tile: int, slots, steps, accumulate):
        """Issue O += P V of a query tile for some steps of 16 keys; ``slots`` are those of P and V."""
        slot, value_slot = slots
        probabilities = self.tensor.operand(f"probabilities{tile}", self.output_mma, self.dtype, slot)
        operands = probabilities, self.value[None, None, None, value_slot]
        tcgen05.issue(self.output_mma, self.output[tile], operands, steps, accumulate)


@cute.jit
def multiply(stream, products, ends):
    """Follow the tiles. Scores are issued ``ahead`` steps before the output that they lead to."""
    plan = products.plan
    ahead = plan.score_stages
    stream, tile = next_tile(stream)
    while tile.row_block != END_OF_WORK:
        if tile.n_begin < tile.n_end:
            steps = tile.n_end - tile.n_begin
            ends = first_scores(products, ends)
            rest = 1
            if cutlass.const_expr(ahead > 1):
                rest = cutlass.min(steps, ahead)
                for _ in cutlass.range(rest - 1, unroll=1):
                    ends = next_scores(products, ends)
            accumulate = cutlass.Boolean(False)
            for _ in cutlass.range(steps - ahead, unroll=1):
                ends = step(products, ends, accumulate, more=True)
                accumulate = cutlass.Boolean(True)
            for _ in cutlass.range(rest, unroll=1):
                ends = step(products, ends, accumulate, more=False)
                accumulate = cutlass.Boolean(True)
            for i in cutlass.range_constexpr(plan.query_tiles):
                ends.query.release(i)
        elif cutlass.const_expr(plan.output_in_query and plan.may_lack_keys):
            for _ in cutlass.range_constexpr(plan.query_tiles):
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
        ends = start_scores(products, ends, i, key_slot)
        ends.query.advance()
    ends.ring("key").release(key_slot)
    ends.ring("key").advance()
    return ends


@cute.jit
def next_scores(products, ends):
    """S of a further step, of every query tile."""
    key_slot = ends.ring("key").wait()
    for i in cutlass.range_constexpr(products.plan.query_tiles):
        ends = start_scores(products, ends, i, key_slot)
    ends.ring("key").release(key_slot)
    ends.ring("key").advance()
    return ends


@cute.jit
def start_scores(products, ends, i: cutlass.Constexpr[int], key_slot):
    """S of query tile ``i``, into its next slot."""
    scores = ends.of("scores", i)
    products.start_scores(i, (scores.index, key_slot), math.zero_of(scores.phase))
    scores.commit()
    scores.advance()
    return ends


@cute.jit
def step(products, ends, accumulate, more: cutlass.Constexpr[bool]):
    """O += P V of this step and, if there are ``more``, S in its place, of every query tile."""
    plan = products.plan
    value_slot = ends.ring("value").wait()
    ends.ring("value").advance()
    key_slot = value_slot
    for i in cutlass.range_constexpr(plan.query_tiles):
        ends = add_values(products, ends, i, value_slot, accumulate)
        if cutlass.const_expr(i == plan.query_tiles - 1):
            ends.ring("value").release(value_slot)
        if cutlass.const_expr(not more or plan.score_stages > 1):
            ends.of("output", i).commit()
            ends.of("output", i).advance()
        if cutlass.const_expr(more):
            if cutlass.const_expr(i == 0):
                key_slot = ends.ring("key").wait()
            ends = start_scores(products, ends, i, key_slot)
    if cutlass.const_expr(more):
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
    probabilities = ends.of("probabilities", i)
    slots = probabilities.wait(), value_slot + math.zero_of(probabilities.phase)
    tensor_memory.after_wait()
    products.start_output(i, slots, (0, early), accumulate)
    if cutlass.const_expr(early < all_steps):
        ends.of("late", i).wait()
        tensor_memory.after_wait()
        products.start_output(i, slots, (early, all_steps), accumulate)
        ends.of("late", i).advance()
    ends.of("rescaled", i).advance()
    ends.of("probabilities", i).advance()
    return ends
