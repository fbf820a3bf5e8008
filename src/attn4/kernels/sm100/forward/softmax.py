"""The softmax role of one query tile: a thread a row, scores in and probabilities out through tensor memory.

The probabilities of a step lie in the columns of its scores, which are all read before. Nothing waits for
the output: a maximum that grew is left to the correction warpgroup, which gets the factor through shared
memory. If the plan says so, the warpgroups of two query tiles take turns in exponentiating.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, tensor_memory
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.channel import Turn
from attn4.kernels.shared.masking import mask_row
from attn4.kernels.shared.softmax import choose_scale, known
from attn4.kernels.shared.stream import next_tile
from attn4.kernels.shared.tiles import END_OF_WORK

PIECE = 32
"""Scores that are exponentiated, rounded and stored together."""


class RowSoftmax(Fixed):
    """The statistics of a thread's row, and where the query tile's scores, probabilities and factors lie.

    ``row_max`` is in units of the raw scores and lags behind the true maximum by at most
    ``rescale_threshold`` in log2 units; ``row_sum`` is the sum of 2^((score - row_max) * scale).
    ``row_stats`` (rows, 2) is shared memory: the factor of the output in column 0 (of the first step without
    meaning), and after the last step the sum in column 0 and the maximum in column 1, which is the thread's
    own until then.
    """

    def __init__(self, plan, bounds, scale_log2, index: Int32, memory, thread):
        self.plan = plan
        self.bounds = bounds
        self.scale_log2 = scale_log2
        self.tensor, self.row_stats = memory
        self.index = index
        self.turn = Turn.of(plan, index)
        self.thread = thread
        self.row = thread + index * plan.row_tile
        self.row_max = cute.make_rmem_tensor(1, Float32)
        self.row_sum = cute.make_rmem_tensor(1, Float32)
        self.scale = cute.make_rmem_tensor(1, Float32)

    def load_scores(self, slot):
        """This thread's row of scores, in registers."""
        columns = self.tensor.columns("scores", self.index, slot)
        scores = cute.make_rmem_tensor(self.plan.tile_n, Float32)
        for first in range(0, self.plan.tile_n, PIECE):
            piece = cute.make_tensor(scores.iterator + first, cute.make_layout(PIECE))
            tensor_memory.load(columns, first, piece, self.thread)
        tensor_memory.wait_loads()
        return scores

    def begin(self):
        """Forget the row before."""
        self.row_max[0] = -Float32.inf
        self.row_sum[0] = Float32(0.0)

    @cute.jit
    def raise_max(self, scores, masked: cutlass.Constexpr[bool]):
        """Fold the maximum of ``scores`` in; returns the factor of what was summed before."""
        old = self.row_max[0]
        new = math.reduce_columns(scores, cute.arch.fmax, old)
        if cutlass.const_expr(masked):
            self.scale[0] = choose_scale(new, self.scale_log2) if old == -Float32.inf else self.scale[0]
        distance = (old - known(new, masked)) * self.scale[0]
        if cutlass.const_expr(self.plan.softmax.rescale_threshold > 0):
            stays = distance >= -self.plan.softmax.rescale_threshold
            new = old if stays else new
            distance = Float32(0.0) if stays else distance
        factor = cute.math.exp2(distance, fastmath=True)
        self.row_max[0] = new
        self.row_sum[0] = self.row_sum[0] * factor
        return factor

    @cute.jit
    def take_turn(self, offset):
        """Wait until this warpgroup may take exponentials; returns ``offset``.

        Where it waits, the offset comes back from shared memory: nothing but a data dependence keeps ptxas
        from moving most of the exponentials above the wait.
        """
        if cutlass.const_expr(self.turn.channel is None):
            return offset
        self.row_stats[self.thread, 1] = offset
        self.turn.take()
        return self.row_stats[self.thread, 1]

    @cute.jit
    def exponentiate(self, scores, columns, offset, first: cutlass.Constexpr[int], masked: cutlass.Constexpr):
        """Turn ``PIECE`` scores from ``first`` on into 2^(score scale + offset), and store them, rounded."""
        scale = self.scale[0]
        words = cute.make_rmem_tensor(PIECE // 2, Int32)
        for pair in cutlass.range_constexpr(PIECE // 2):
            column = first + 2 * pair
            x = cute.arch.fma_packed_f32x2(
                (scores[column], scores[column + 1]), (scale, scale), (offset, offset), ftz=True
            )
            if cutlass.const_expr(not masked and self.by_polynomial(pair)):
                x = math.exp2_fma_pair(x)
            else:
                x = tuple(cute.math.exp2(value, fastmath=True) for value in x)
            scores[column], scores[column + 1] = x
            words[pair] = math.pack(x[0], x[1], self.dtype)
        stored = cute.recast_tensor(words, Float32)
        tensor_memory.store(stored, columns, first // 2, self.thread)

    def by_polynomial(self, pair: int) -> bool:
        """Whether the FMA units exponentiate this pair; not if masked, as only 2^-inf is an exact zero."""
        every = self.plan.softmax.fma_exp_every
        return every > 0 and pair % every == every - 1

    @property
    def dtype(self):
        """Of the probabilities."""
        return cutlass.BFloat16 if self.plan.dtype == "bfloat16" else cutlass.Float16

    def add_up(self, sums, scores, first: int):
        """Add the ``PIECE`` probabilities from ``first`` on to ``sums``, two chains of pairs or none yet."""
        sums = sums or [(self.row_sum[0], Float32(0.0)), None]
        for column in range(first, first + PIECE, 2):
            value, chain = (scores[column], scores[column + 1]), column // 2 % 2
            before = sums[chain]
            sums[chain] = cute.arch.add_packed_f32x2(before, value, ftz=True) if before else value
        return sums

    def keep_sum(self, sums):
        """Fold both chains into the row's sum."""
        low, high = cute.arch.add_packed_f32x2(*sums, ftz=True)
        self.row_sum[0] = low + high


@cute.jit
def soften(stream, row, ends):
    """Follow the tiles: key blocks from the last to the first, masked ones at either end."""
    row.turn.open()
    stream, tile = next_tile(stream)
    while tile.row_block != END_OF_WORK:
        if tile.n_begin < tile.n_end:
            row.begin()
            bounds = row.bounds
            free_begin, free_end = bounds.unmasked(tile)
            block = tile.n_end - 1
            # The first block is masked in any case: keys may end within it.
            stop = cutlass.max(cutlass.min(free_end, block), tile.n_begin)
            for _ in cutlass.range(block - stop + 1, unroll=1):
                ends = step(row, tile, block, ends, masked=True)
                block -= 1
            stop = tile.n_begin
            if cutlass.const_expr(bounds.kind == "window"):
                stop = cutlass.max(free_begin, tile.n_begin)
            for _ in cutlass.range(block - stop + 1, unroll=1):
                ends = step(row, tile, block, ends, masked=False)
                block -= 1
            if cutlass.const_expr(bounds.kind == "window"):
                for _ in cutlass.range(block - tile.n_begin + 1, unroll=1):
                    ends = step(row, tile, block, ends, masked=True)
                    block -= 1
            ends = hand_over_sums(row, ends)
        stream, tile = next_tile(stream)
    row.turn.close()


@cute.jit
def step(row, tile, block: Int32, ends, masked: cutlass.Constexpr[bool]):
    """One block of keys."""
    slot = ends.scores.wait()
    tensor_memory.after_wait()
    scores = row.load_scores(slot)
    ends.scores.advance()
    if cutlass.const_expr(masked):
        mask_row(scores, row.bounds, tile, row.row, block)
    factor = row.raise_max(scores, masked)
    ends.row_stats.acquire()
    row.row_stats[row.thread, 0] = factor
    ends.row_stats.signal()
    ends.row_stats.advance()
    offset = row.take_turn(-(known(row.row_max[0], masked) * row.scale[0]))
    columns = row.tensor.columns("probabilities", row.index, slot)
    early = row.plan.tile_n - row.plan.late_keys
    sums = None
    for piece in cutlass.range_constexpr(0, row.plan.tile_n, PIECE):
        row.exponentiate(scores, columns, offset, piece, masked)
        if cutlass.const_expr(piece > 0):
            # A piece late: so ptxas moves fewest registers about.
            sums = row.add_up(sums, scores, piece - PIECE)
        if cutlass.const_expr(piece + PIECE == row.plan.tile_n):
            row.turn.give()
        if cutlass.const_expr(piece + PIECE == early):
            hand_over(ends.probabilities)
    if cutlass.const_expr(row.plan.late_keys > 0):
        hand_over(ends.late)
        ends.late.advance()
    ends.probabilities.advance()
    row.keep_sum(row.add_up(sums, scores, row.plan.tile_n - PIECE))
    return ends


@cute.jit
def hand_over(producer):
    """Say that this warp's rows are in tensor memory."""
    tensor_memory.wait_stores()
    tensor_memory.before_arrive()
    producer.signal()


@cute.jit
def hand_over_sums(row, ends):
    """Leave the row's sum and maximum for the correction warpgroup."""
    ends.row_stats.acquire()
    row.row_stats[row.thread, 0] = row.row_sum[0]
    row.row_stats[row.thread, 1] = row.row_max[0]
    ends.row_stats.signal()
    ends.row_stats.advance()
    return ends
