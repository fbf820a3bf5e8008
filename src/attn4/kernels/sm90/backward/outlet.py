"""Where the results of the Hopper backward go: sums of dQ, and dK and dV of a tile."""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math, mma
from attn4.kernels.dsl.atomics import add_four
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.exchange import store_exchanged
from attn4.kernels.dsl.staging import Staging
from attn4.kernels.shared.query_blocks import sums_of_block, sums_of_sequence

FOUR = 4
"""Registers that one instruction adds to consecutive sums."""


def lock_of(plan, sums):
    """The first of the counters behind the ``sums`` of a block, which a deterministic plan has."""
    return cute.recast_ptr(sums.iterator + plan.tile_m * plan.head_dim, dtype=Int32)


class QuerySums(Fixed):
    """The float32 sums of dQ in global memory, (heads, blocks of the sequence, elements of a block)."""

    def __init__(self, plan, sums, first_head, thread):
        self.plan = plan
        self.sums = sums
        self.first_head = first_head
        self.thread = thread

    def of(self, walk):
        """Those of a step."""
        return self.block(walk).iterator

    def block(self, walk):
        """Those of a step, as a tensor."""
        return sums_of_block(self.sums, self.first_head + walk.member, walk.block)

    def add(self, values, walk, part: int = 0, parts: int = 1):
        """Add one of equal parts of a thread's registers to the sums of a step, if it is one; the order is
        that of `sum_layout`.
        """
        sums = self.of(walk)
        threads = self.plan.role("differentiate").warps * cute.arch.WARP_SIZE
        fours = cute.size(values) // FOUR
        for four in range(part * fours // parts, (part + 1) * fours // parts):
            registers = [values[FOUR * four + i] for i in range(FOUR)]
            add_four(sums + FOUR * (threads * four + self.thread), registers, walk.number)


def query_sums(plan, lengths, dq_sum, tile, thread) -> QuerySums:
    """The sums that a tile adds to, of ``dq_sum`` as `attn4.plan.workspace` has them."""
    rows = sums_of_sequence(plan, lengths, dq_sum, tile.batch)
    return QuerySums(plan, rows, tile.kv_head * lengths.group, thread)


class Outlet(Fixed):
    """Where a thread's results go: ``dq_sum`` as of `attn4.plan.workspace`, and dK and dV."""

    def __init__(self, worker, dq_sum, gradients, softmax_scale):
        self.worker = worker
        self.dq_sum = dq_sum
        self.gradients = gradients
        self.softmax_scale = softmax_scale

    def sums(self, tile):
        """The sums that a tile adds to."""
        worker = self.worker
        return query_sums(worker.plan, worker.lengths, self.dq_sum, tile, worker.ops.thread)

    def store_dv(self, tile, slot):
        """Write dV of a tile, turned round in ``slot`` of dS, which nobody reads or writes now."""
        self._store(self.gradients.dv, tile, self.worker.dv, Float32(1.0), slot)

    def store_dk(self, tile, slot):
        """Write dK of a tile, which is not scaled yet."""
        self._store(self.gradients.dk, tile, self.worker.dk, self.softmax_scale, slot)

    def _store(self, target, tile, values, scale, slot):
        if self.worker.plan.staged_gradients:
            self._store_staged(target, tile, values, scale, slot)
        else:
            store_rows(self.worker.plan, self.worker.ops.thread, target, tile, values, scale)

    @cute.jit
    def _store_staged(self, target, tile, values, scale, slot):
        """The 64 columns lie in the slot as rows of dS do, so that a warp stays in its own."""
        ops, plan = self.worker.ops, self.worker.plan
        part = cute.local_tile(ops.dscores_tile[None, None, slot], (plan.tile_n, plan.head_dim), (0, 0))
        staging = Staging(ops.dv_mma, ops.thread, part)
        rounded = cute.make_rmem_tensor(values.layout, target.element_type)
        words = cute.recast_tensor(rounded, Int32)
        for i, word in enumerate(scaled_words(values, scale, target.element_type)):
            words[i] = word
        staging.put(rounded)
        staging.write(partial(self._place, target, tile))
        # The next dS, which other lanes write, may go there.
        cute.arch.sync_warp()

    def _place(self, target, tile, row):
        plan = self.worker.plan
        return place_of_key(plan, target, tile, tile.key_block * plan.tile_n + row)


def scaled_words(values, scale, dtype) -> list:
    """Registers times ``scale``, rounded, two in a word."""
    return [
        math.pack(values[2 * i] * scale, values[2 * i + 1] * scale, dtype)
        for i in range(cute.size(values) // 2)
    ]


def place_of_key(plan, target, tile, key):
    """The row of dK or dV, (rows, dim, heads, batch), of a ``key`` of a sequence, and whether it exists."""
    batch = Int32(0) if cutlass.const_expr(plan.cu_seqlens_k) else tile.batch
    return target[tile.k_begin + key, None, tile.kv_head, batch], key < tile.k_rows


@cute.jit
def store_rows(plan: cutlass.Constexpr, thread, target, tile, values, scale):
    """Write the rows of an accumulator that are rows of the sequence, times ``scale``, to ``target``, (rows,
    dim, heads, batch); ``thread`` is that of the warpgroups that hold it.
    """
    words = scaled_words(values, scale, target.element_type)
    for half in cutlass.range_constexpr(2):
        key = tile.key_block * plan.tile_n + mma.first_row(thread) + 8 * half
        store_exchanged(words[half::2], *place_of_key(plan, target, tile, key))
