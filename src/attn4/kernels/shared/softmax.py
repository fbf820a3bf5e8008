"""The online softmax of one warpgroup's rows: running maximum and sum, and the output's factor."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from attn4.kernels.dsl import math, mma
from attn4.kernels.dsl.carried import Fixed

HUGE_LOG2 = 2.0**24
"""Scores of this size, in log2 units, are multiplied by a power of two."""


class OnlineSoftmax(Fixed):
    """Statistics of the two rows that a thread holds, in registers.

    ``scale`` is ``scale_log2``, or its power of two in a row of huge scores: see ``choose_scale``.
    ``row_max`` is in units of the raw scores and may lag behind the true maximum by ``rescale_threshold``
    in log2 units; ``row_sum`` is this thread's share of the sum of 2^((score - row_max) * scale_log2).
    """

    def __init__(self, plan, scale_log2):
        self.plan = plan
        self.scale_log2 = scale_log2
        self.row_max = cute.make_rmem_tensor(2, Float32)
        self.row_sum = cute.make_rmem_tensor(2, Float32)
        self.rescale = cute.make_rmem_tensor(2, Float32)
        self.scale = cute.make_rmem_tensor(2, Float32)

    @cute.jit
    def first(self, scores):
        """Start a row with its first block of scores; they become probabilities."""
        for half in cutlass.range_constexpr(2):
            row = mma.by_row(scores)[half, None]
            row_max = quad_reduce(math.reduce_columns(row, cute.arch.fmax, row[0]), cute.arch.fmax)
            self.row_max[half] = row_max
            self.rescale[half] = Float32(1.0)
            self.scale[half] = choose_scale(row_max, self.scale_log2)
            self.row_sum[half] = self._exponentiate(row, half, Float32(0.0), masked=True)

    @cute.jit
    def update(self, scores, output, masked: cutlass.Constexpr[bool]):
        """Fold in another block; its scores become probabilities.

        Without a threshold, ``rescale`` becomes the factor of ``output``. With one, ``output`` is rescaled
        here where a maximum moves, and only there is the last product awaited, which may be adding to it.
        Both maxima come first: ptxas then starts some exponentials before it waits for the output product.
        """
        by_row = mma.by_row(scores)
        if cutlass.const_expr(self.plan.rescale_threshold > 0):
            self._follow(by_row, output)
        else:
            self._raise(by_row, masked)
        for half in cutlass.range_constexpr(2):
            row_sum = self.row_sum[half]
            if cutlass.const_expr(self.plan.rescale_threshold == 0):
                row_sum = row_sum * self.rescale[half]
            self.row_sum[half] = self._exponentiate(by_row[half, None], half, row_sum, masked)

    @cute.jit
    def _raise(self, by_row, masked: cutlass.Constexpr[bool]):
        """Both maxima become those of all scores so far."""
        for half in cutlass.range_constexpr(2):
            old_max = self.row_max[half]
            row = by_row[half, None]
            row_max = quad_reduce(math.reduce_columns(row, cute.arch.fmax, old_max), cute.arch.fmax)
            self._move(half, row_max, masked)

    @cute.jit
    def _follow(self, by_row, output):
        """Move the maxima that scores exceed by more than the threshold; a warp without any only votes.

        A vote is no shuffle, which would wait until the products that were issued before have begun.
        """
        largest = [
            math.reduce_columns(by_row[half, None], cute.arch.fmax, by_row[half, 0]) for half in range(2)
        ]
        if cute.arch.vote_any_sync(self._exceeds(largest[0], 0) or self._exceeds(largest[1], 1)):
            for half in cutlass.range_constexpr(2):
                row_max = quad_reduce(largest[half], cute.arch.fmax)
                exceeds = self._exceeds(row_max, half)
                self._move(half, row_max if exceeds else self.row_max[half], masked=True)
                self.row_sum[half] = self.row_sum[half] * self.rescale[half]
            mma.wait(0)
            scale_rows(output, self.rescale)

    def _exceeds(self, score, half: int):
        return (score - self.row_max[half]) * self.scale[half] > self.plan.rescale_threshold

    @cute.jit
    def _move(self, half: cutlass.Constexpr[int], row_max, masked: cutlass.Constexpr[bool]):
        old_max = self.row_max[half]
        self.row_max[half] = row_max
        self.rescale[half] = cute.math.exp2(
            (old_max - known(row_max, masked)) * self.scale[half], fastmath=True
        )

    def done(self):
        """A zero that is known once the exponentials of the first row are: the sign of their sum."""
        return cute.arch.inline_ptx(
            "{ .reg .b32 bits; mov.b32 bits, {$r0}; shr.u32 {$w0}, bits, 31; }",
            write_only_types=[cutlass.Int32],
            read_only_args=[self.row_sum[0]],
        )

    def apply_rescale(self, output):
        """Multiply the output's rows by ``rescale``."""
        scale_rows(output, self.rescale)

    @cute.jit
    def finish(self, output):
        """Divide the output by the row sums; returns both rows' natural-log LSE. An empty row: 0, -inf."""
        lse = cute.make_rmem_tensor(2, Float32)
        for half in cutlass.range_constexpr(2):
            total = quad_reduce(self.row_sum[half], lambda a, b: a + b)
            empty = total == 0.0
            self.rescale[half] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            log2_sum = self.row_max[half] * self.scale_log2 + cute.math.log2(total, fastmath=True)
            lse[half] = -Float32.inf if empty else log2_sum * math.LN_2
        scale_rows(output, self.rescale)
        return lse

    @cute.jit
    def empty(self):
        """Statistics of rows that saw no key."""
        self.row_max.fill(-Float32.inf)
        self.row_sum.fill(0.0)

    @cute.jit
    def _exponentiate(self, row, half: cutlass.Constexpr[int], row_sum, masked: cutlass.Constexpr[bool]):
        offset = known(self.row_max[half], masked) * self.scale[half]
        values = row.load() * self.scale[half] - offset
        every = self.plan.fma_exp_every
        if cutlass.const_expr(every == 0 or masked):
            # A masked score must give an exact zero, which the polynomial does not.
            row.store(cute.math.exp2(values, fastmath=True))
        else:
            row.store(values)
            for i in cutlass.range_constexpr(cute.size(row)):
                if cutlass.const_expr(i % every == every - 1):
                    row[i] = math.exp2_fma(row[i])
                else:
                    row[i] = cute.math.exp2(row[i], fastmath=True)
        return math.reduce_columns(row, lambda a, b: a + b, row_sum)


@cute.jit
def known(row_max, masked: cutlass.Constexpr[bool]):
    """The maximum, or 0 for a row that has seen no key: -inf - -inf would be NaN.

    Without a mask it has seen some.
    """
    if cutlass.const_expr(not masked):
        return row_max
    return Float32(0.0) if row_max == -Float32.inf else row_max


@cute.jit
def choose_scale(row_max, scale_log2):
    """The factor of a row's scores: ``scale_log2``, rounded down to a power of two if they are huge.

    2^(score * scale - row_max * scale) takes one fused operation, but the second product is rounded: by
    2^-25 of itself, which is thousands once it passes 2^38 and would overflow the largest weight. Times a
    power of two it is exact; and past 2^24 scores that differ at all differ by 2 in log2 units, so that the
    largest wins whatever the factor.
    """
    huge = cute.arch.fmax(row_max, -row_max) * scale_log2 > HUGE_LOG2
    power = cute.arch.inline_ptx(
        "{ .reg .b32 bits; mov.b32 bits, {$r0}; and.b32 bits, bits, 0xff800000; mov.b32 {$w0}, bits; }",
        write_only_types=[Float32],
        read_only_args=[scale_log2],
    )
    # A row that has seen no key has a maximum of -inf, which is not huge.
    return power if huge and row_max != -Float32.inf else scale_log2


@cute.jit
def clear_rows(accumulator, lse, keep):
    """Rows of which ``keep`` is false become 0 with an LSE of -inf, whatever they hold."""
    by_row = mma.by_row(accumulator)
    for half in cutlass.range_constexpr(2):
        lse[half] = lse[half] if keep[half] else -Float32.inf
        for i in cutlass.range_constexpr(cute.size(by_row, mode=[1])):
            by_row[half, i] = by_row[half, i] if keep[half] else Float32(0.0)


@cute.jit
def quad_reduce(value, function: cutlass.Constexpr):
    """Reduce over the four lanes that share a row."""
    value = function(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return function(value, cute.arch.shuffle_sync_bfly(value, offset=2))


@cute.jit
def scale_rows(accumulator, factors):
    """Multiply the two rows of an accumulator fragment by ``factors``."""
    by_row = mma.by_row(accumulator)
    for half in cutlass.range_constexpr(2):
        row = by_row[half, None]
        row.store(row.load() * factors[half])


@cute.jit
def to_operand(scores, operand):
    """Round probabilities to the 16-bit registers of operand A, which hold them in the same order."""
    words = cute.recast_tensor(operand, cutlass.Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = math.pack(scores[2 * i], scores[2 * i + 1], operand.element_type)
