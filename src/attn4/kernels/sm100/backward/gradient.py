"""The computing role: probabilities again from scores, the gradient of scores, and dK and dV rounded.

A thread has a key, and half of the queries of a step. What it stores for the products lies in columns that
it has read, so the two warpgroups never wait for each other. Of a pair of CTAs one warpgroup's half of dS is
for this CTA's dQ, the other's for the peer's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, tensor_memory
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.shared.key_tiles import mask_queries

PIECE = 32
"""Queries that are rounded and stored together."""

STATS = 16
"""Statistics of queries that a thread holds at a time."""

LSE, DELTA = range(2)
"""Kinds of statistics."""

OUT_PIECE = 16
"""Columns of dK or dV that a thread holds at a time."""


class KeyGradient(Fixed):
    """Where scores, their gradients and results of a thread's key lie.

    ``half`` is which half of the queries, ``key`` the row of the tile. ``row_stats`` are the negated
    statistics of queries, (rows, LSE or delta, slots) in shared memory; ``dscores_shared`` is where dS goes
    there, (keys, queries), of a pair only those of the half.
    """

    def __init__(self, plan, bounds, scalars, shared, tensor, thread):
        self.plan = plan
        self.bounds = bounds
        self.softmax_scale = scalars.softmax_scale
        self.row_stats, self.dscores_shared, self.out = shared
        self.tensor = tensor
        self.queries = plan.tile_m // 2
        self.half = thread // tensor_memory.LANES
        self.key = thread % tensor_memory.LANES
        self.first_query = self.half * self.queries if plan.cta_group == 1 else 0
        self.scores = tensor.lanes("scores", self.half * self.queries)
        self.dprobabilities = tensor.lanes("dprobabilities", self.half * self.queries)
        self.probability_words = self.words("probabilities")
        self.dscore_words = self.words("dscores")

    def words(self, name: str):
        """The columns where this thread's half of the operand ``name`` lies."""
        first, second = self.plan.buffer(f"{name}0"), self.plan.buffer(f"{name}1")
        return self.tensor.lanes(f"{name}0", self.half * (second.offset - first.offset))

    @property
    def dtype(self):
        """Of the operands."""
        return self.dscores_shared.element_type

    def read(self, columns, first: int, values):
        """Start to read as many columns as ``values`` has."""
        tensor_memory.load(columns, first, values, self.key)

    def stats(self, kind: int, slot, first: int):
        """``STATS`` of the half's statistics from query ``first`` on, in registers."""
        values = cute.make_rmem_tensor(STATS, Float32)
        pieces = cute.zipped_divide(self.row_stats[None, kind, slot], (STATS,))
        cute.autovec_copy(pieces[None, (self.half * self.queries + first) // STATS], values)
        return values

    @cute.jit
    def exponents(self, tile, block: Int32, slot):
        """What 2 is raised to: scores in log2 units less the LSE; -inf where the mask hides."""
        values = cute.make_rmem_tensor(self.queries, Float32)
        for first in cutlass.range_constexpr(0, self.queries, PIECE):
            self.read(self.scores, first, cute.make_tensor(values.iterator + first, cute.make_layout(PIECE)))
        tensor_memory.wait_loads()
        scale = self.softmax_scale * math.LOG2_E
        for first in cutlass.range_constexpr(0, self.queries, STATS):
            lse = self.stats(LSE, slot, first)
            for i in cutlass.range_constexpr(0, STATS, 2):
                at = first + i
                values[at], values[at + 1] = cute.arch.fma_packed_f32x2(
                    (values[at], values[at + 1]), (scale, scale), (lse[i], lse[i + 1]), ftz=True
                )
        if self.bounds.hides(tile, block):
            first_query = block * self.plan.tile_m + self.half * self.queries
            mask_queries(values, self.bounds, tile, self.key, first_query)
        return values

    @cute.jit
    def store_probabilities(self, values):
        """Turn exponents into probabilities, and store them, rounded."""
        for first in cutlass.range_constexpr(0, self.queries, PIECE):
            words = cute.make_rmem_tensor(PIECE // 2, Int32)
            for pair in cutlass.range_constexpr(PIECE // 2):
                at = first + 2 * pair
                for i in cutlass.range_constexpr(at, at + 2):
                    values[i] = cute.math.exp2(values[i], fastmath=True)
                words[pair] = math.pack(values[at], values[at + 1], self.dtype)
            stored = cute.recast_tensor(words, Float32)
            tensor_memory.store(stored, self.probability_words, first // 2, self.key)

    @cute.jit
    def store_dscores(self, probabilities, slot):
        """The gradient dS = P (dP - delta), rounded, for dK in tensor memory and for dQ in shared memory: of
        a pair later, from what is returned.
        """
        rounded = cute.make_rmem_tensor(self.queries // 2, Int32)
        for first in cutlass.range_constexpr(0, self.queries, PIECE):
            values = cute.make_rmem_tensor(PIECE, Float32)
            self.read(self.dprobabilities, first, values)
            tensor_memory.wait_loads()
            words = piece_of(rounded, first // PIECE, PIECE // 2)
            for pair in cutlass.range_constexpr(PIECE // 2):
                at = 2 * pair
                if cutlass.const_expr(at % STATS == 0):
                    delta = self.stats(DELTA, slot, first + at)
                difference = cute.arch.add_packed_f32x2(
                    (values[at], values[at + 1]), (delta[at % STATS], delta[at % STATS + 1]), ftz=True
                )
                low, high = cute.arch.mul_packed_f32x2(
                    (probabilities[first + at], probabilities[first + at + 1]), difference, ftz=True
                )
                words[pair] = math.pack(low, high, self.dtype)
            stored = cute.recast_tensor(words, Float32)
            tensor_memory.store(stored, self.dscore_words, first // 2, self.key)
            if cutlass.const_expr(self.plan.cta_group == 1):
                self.share_dscores(rounded, first)
        return rounded

    @cute.jit
    def share_dscores(self, rounded, first: cutlass.Constexpr[int]):
        """Copy the piece of ``rounded`` dS from query ``first`` of the half on to shared memory."""
        words = piece_of(rounded, first // PIECE, PIECE // 2)
        row = cute.zipped_divide(self.dscores_shared, (1, PIECE))
        target = row[(0, None), (self.key, (self.first_query + first) // PIECE)]
        cute.autovec_copy(cute.recast_tensor(words, self.dtype), target)

    @cute.jit
    def stage(self, name: cutlass.Constexpr, factor, exists):
        """Round this thread's half of a row of the sum ``name``, times ``factor``, for its way out; zeros if
        no step has been summed.
        """
        columns = self.plan.buffer(name).shape[1] // 2
        source = self.tensor.lanes(name, self.half * columns)
        for first in cutlass.range_constexpr(0, columns, OUT_PIECE):
            words = cute.make_rmem_tensor(OUT_PIECE // 2, Int32)
            words.fill(0)
            if exists:
                values = cute.make_rmem_tensor(OUT_PIECE, Float32)
                self.read(source, first, values)
                tensor_memory.wait_loads()
                for pair in cutlass.range_constexpr(OUT_PIECE // 2):
                    words[pair] = math.pack(
                        values[2 * pair] * factor, values[2 * pair + 1] * factor, self.dtype
                    )
            row = cute.zipped_divide(self.out[name][None, None, 0], (1, OUT_PIECE))
            target = row[(0, None), (self.key, (self.half * columns + first) // OUT_PIECE)]
            cute.autovec_copy(cute.recast_tensor(words, self.dtype), target)


def piece_of(registers, number: int, size: int):
    """Registers ``number * size`` on, as many as ``size``."""
    return cute.make_tensor(registers.iterator + number * size, cute.make_layout(size))


@cute.jit
def differentiate(tile, group: Int32, gradient, ends):
    """Every step, then the results."""
    for _ in cutlass.range(group, unroll=1):
        for block in cutlass.range(tile.first, tile.last, unroll=1):
            ends = step(gradient, tile, block, ends)
    exists = tile.first < tile.last
    for name in cutlass.range_constexpr(2):
        summed = ends.dk if name else ends.dv
        if exists:
            summed.wait()
            tensor_memory.after_wait()
        gradient.stage("dk" if name else "dv", gradient.softmax_scale if name else Float32(1.0), exists)
        cute.arch.fence_view_async_shared()
        (ends.dk_out if name else ends.dv_out).signal()
    if cutlass.const_expr(gradient.plan.cta_group > 1):
        # The leader's last commit still arrives here.
        ends.dscores.acquire()


@cute.jit
def step(gradient, tile, block: Int32, ends):
    """One block of queries."""
    slot = ends.row_stats.wait()
    ends.row_stats.advance()
    ends.scores.wait()
    ends.scores.advance()
    tensor_memory.after_wait()
    values = gradient.exponents(tile, block, slot)
    gradient.store_probabilities(values)
    tensor_memory.wait_stores()
    tensor_memory.before_arrive()
    ends.probabilities.signal()
    ends.probabilities.advance()
    ends.dprobabilities.wait()
    ends.dprobabilities.advance()
    tensor_memory.after_wait()
    if cutlass.const_expr(gradient.plan.cta_group > 1):
        ends = hand_to_relay(gradient, gradient.store_dscores(values, slot), ends)
    else:
        if cutlass.const_expr(gradient.plan.channel("dscores").empty_arrivals > 0):
            ends.dscores.acquire()
        gradient.store_dscores(values, slot)
    tensor_memory.wait_stores()
    tensor_memory.before_arrive()
    cute.arch.fence_view_async_shared()
    ends.dscores.signal()
    ends.dscores.advance()
    return ends


@cute.jit
def hand_to_relay(gradient, rounded, ends):
    """Of a pair: dS in shared memory, once dQ of the step before has read what was there."""
    ends.dscores.acquire()
    for first in cutlass.range_constexpr(0, gradient.queries, PIECE):
        gradient.share_dscores(rounded, first)
    cute.arch.fence_view_async_shared()
    ends.dscores_own.signal()
    ends.dscores_own.advance()
    return ends
