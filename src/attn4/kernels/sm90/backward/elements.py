"""The elementwise half of a step: P^T and dS^T, of 64 keys in the registers of a warpgroup.

A thread holds two keys, and of each 8 queries two that follow each other (`kernels/dsl/mma.py`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, mma
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.smem import load_pair

PAIR = 2
"""Neighbouring queries that a thread holds of each 8."""

FOUR = 4
"""Words that a thread stores or loads at once."""


MOST_COLUMNS = 192
"""Of an instruction: its registers must fit into the 128 that a thread of four warpgroups is launched with,
whatever it gets later.
"""


def columns_at_once(head_dim: int) -> int:
    """Columns of dK or dV that one instruction computes."""
    return head_dim if head_dim <= MOST_COLUMNS else head_dim // 2


class Statistics(Fixed):
    """A statistic of the queries in a slot, by pair: loaded when it is asked for."""

    def __init__(self, elements, kind: int, slot):
        self.elements = elements
        self.kind = kind
        self.slot = slot

    def __getitem__(self, pair: int):
        return self.elements.statistic(self.kind, pair, self.slot)

    def loaded(self):
        """Those of all pairs, in registers."""
        return [self[pair] for pair in range(self.elements.pairs)]


class Elements(Fixed):
    """What warpgroups need; ``stats`` are negated LSE and delta, (queries, 2, slots).

    ``thread`` is counted from the first of them, whose keys begin at ``first_key`` of a tile.
    """

    def __init__(self, plan, dtype, keys, thread, stats):
        self.plan = plan
        self.dtype = dtype
        self.bounds, self.first_key = keys
        self.thread = thread
        self.stats = stats

    @property
    def pairs(self) -> int:
        """Pairs of queries of a step that a thread has."""
        return self.plan.tile_m // 4 // PAIR

    @cute.jit
    def exponentiate(self, scores, scale_log2, walk, slot):
        """P^T of the scores of a step, whose statistics are in ``slot``; in place."""
        self.hide(scores, walk)
        by_row = mma.by_row(scores)
        for pair in cutlass.range_constexpr(cute.size(by_row, mode=[1]) // PAIR):
            lse = self.statistic(0, pair, slot)
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(PAIR):
                    score = by_row[half, PAIR * pair + i] * scale_log2 + lse[i]
                    by_row[half, PAIR * pair + i] = cute.math.exp2(score, fastmath=True)

    @cute.jit
    def hide(self, scores, walk):
        """Make -inf of the scores of a step that the mask hides."""
        if self.bounds.hides(walk.tile, walk.block):
            self._mask(scores, walk)

    @cute.jit
    def differentiate(self, dprobabilities, words, delta: cutlass.Constexpr):
        """dS^T = P^T (dP^T - delta), in place; ``words`` are P^T rounded, two queries each, ``delta`` by
        pair.
        """
        dscores = mma.by_row(dprobabilities)
        for pair in cutlass.range_constexpr(cute.size(dscores, mode=[1]) // PAIR):
            deltas = delta[pair]
            for half in cutlass.range_constexpr(2):
                both = math.unpack(words[2 * pair + half], self.dtype)
                for i in cutlass.range_constexpr(PAIR):
                    column = PAIR * pair + i
                    dscores[half, column] = both[i] * (dscores[half, column] + deltas[i])

    @cute.jit
    def differentiate_packed(self, dprobabilities, words, delta: cutlass.Constexpr, dscores):
        """`differentiate` with dP^T - delta rounded first, to the words of ``dscores``.

        bfloat16 only: half precision has no room for a dP^T that is large where P^T is small.
        """
        by_row = mma.by_row(dprobabilities)
        for pair in cutlass.range_constexpr(self.pairs):
            deltas = delta[pair]
            for half in cutlass.range_constexpr(2):
                both = [by_row[half, PAIR * pair + i] + deltas[i] for i in range(PAIR)]
                rounded = math.pack(*both, self.dtype)
                dscores[2 * pair + half] = math.multiply_bfloat16(rounded, words[2 * pair + half])

    def statistic(self, kind: int, pair: int, slot):
        """A statistic of this thread's queries 8 ``pair`` on."""
        held = cute.make_rmem_tensor(PAIR, Float32)
        pairs = cute.zipped_divide(self.stats[None, kind, slot], (PAIR,))
        cute.autovec_copy(pairs[None, 4 * pair + cute.arch.lane_idx() % 4], held)
        return held

    @cute.jit
    def _mask(self, scores, walk):
        by_row = mma.by_row(scores)
        first_query = walk.block * self.plan.tile_m + PAIR * (cute.arch.lane_idx() % 4)
        for half in cutlass.range_constexpr(2):
            key = self.first_key + mma.first_row(self.thread) + 8 * half
            begin, end = self.bounds.seen_by(walk.tile, key, first_query)
            for i in cutlass.range_constexpr(cute.size(by_row, mode=[1])):
                column = 8 * (i // 2) + i % 2
                visible = column >= begin
                if cutlass.const_expr(self.bounds.kind == "window"):
                    visible = visible and column < end
                by_row[half, i] = by_row[half, i] if visible else -Float32.inf


class NearElements(Elements):
    """`Elements` that keep the address of a thread's first statistic: an instruction and a register less in a
    step. Where there is one role alone: of the others each was measured as it is.
    """

    def __init__(self, plan, dtype, keys, thread, stats):
        super().__init__(plan, dtype, keys, thread, stats)
        self.first = math.kept(stats.iterator.toint() + cute.arch.lane_idx() % 4 * (4 * PAIR))

    def statistic(self, kind: int, pair: int, slot):
        """As that of `Elements`."""
        rows = self.plan.tile_m
        return load_pair(self.first + slot * (2 * 4 * rows), 4 * (kind * rows + 4 * PAIR * pair))


class Exchange(Fixed):
    """Slots for the words of a warpgroup's operand, each thread's its own: another warpgroup's thread of the
    same number reads them.
    """

    def __init__(self, pointer, count: int, slots: int, thread):
        fours = count // FOUR
        layout = cute.make_layout(
            (FOUR, fours, slots), stride=(1, FOUR * mma.GROUP_THREADS, count * mma.GROUP_THREADS)
        )
        self.words = cute.make_tensor((pointer + FOUR * thread).align(4 * FOUR), layout)

    @cute.jit
    def write(self, operand, slot):
        """Store the registers of ``operand``."""
        words = cute.recast_tensor(operand, Int32)
        for four in cutlass.range_constexpr(cute.size(self.words, mode=[1])):
            piece = cute.make_tensor(words.iterator + FOUR * four, cute.make_layout(FOUR))
            cute.autovec_copy(piece, self.words[None, four, slot])

    @cute.jit
    def read(self, slot):
        """The words of ``slot``, in registers."""
        held = cute.make_rmem_tensor((FOUR, cute.size(self.words, mode=[1])), Int32)
        for four in cutlass.range_constexpr(cute.size(self.words, mode=[1])):
            cute.autovec_copy(self.words[None, four, slot], held[None, four])
        return cute.make_tensor(held.iterator, cute.make_layout(cute.size(held)))
