"""The pre-pass of a ragged batch: its sequences by the steps of their longest tile, longest first."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl.smem import Arena
from attn4.kernels.shared.scheduler import Lengths, sequence
from attn4.kernels.shared.tiles import Bounds

KEY_BITS = 31
"""Of a sort key: the steps that a sequence lacks to the most that can be told apart, then its index."""


class SortBatches:
    """The kernel of one plan: one CTA sorts in shared memory."""

    def __init__(self, plan):
        self.plan = plan
        self.most = plan.buffer("keys").shape[0]
        self.index_bits = (self.most - 1).bit_length()
        self.most_steps = (1 << (KEY_BITS - self.index_bits)) - 1

    @cute.jit
    def __call__(  # noqa: D102 - ``compile_plan`` documents the arguments
        self,
        order: cute.Tensor,
        rows_q: Int32,
        rows_k: Int32,
        window_left: Int32,
        window_right: Int32,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        stream,
    ):
        vectors = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        lengths = Lengths(order.shape[0] - 1, Int32(1), Int32(1), rows_q, rows_k, *vectors)
        self.kernel(order, lengths, window_left, window_right).launch(
            grid=[1, 1, 1], block=[self.plan.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, order: cute.Tensor, lengths: Lengths, window_left: Int32, window_right: Int32):
        """Sort, or leave a batch that is too large as it is."""
        plan = self.plan
        thread = cute.arch.thread_idx()[0]
        keys = Arena(plan).words("keys")
        bounds = Bounds(plan.mask, plan.tile_m, plan.tile_n, plan.pack_gqa, window_left, window_right)
        batch = lengths.batch
        if batch <= self.most:
            size = power_of_two(batch)
            for index in cutlass.range(thread, size, plan.threads, unroll=1):
                keys[index] = self.key(index, bounds, lengths)
            cute.arch.sync_threads()
            bitonic_sort(keys, size, thread, plan.threads)
            for place in cutlass.range(thread, batch, plan.threads, unroll=1):
                order[place] = keys[place] & (self.most - 1)
        else:
            for place in cutlass.range(thread, batch, plan.threads, unroll=1):
                order[place] = place
        # Packed rows of no sequence are the least work.
        if thread == 0:
            order[batch] = batch

    @cute.jit
    def key(self, index: Int32, bounds, lengths):
        """Ascending keys are descending steps, ties by index; what is beyond the batch comes last."""
        item = sequence(lengths, index)
        rows = item.q_len * self.plan.pack_gqa
        last_block = cutlass.max(rows - 1, 0) // self.plan.tile_m
        n_begin, n_end = bounds.visited(last_block, item.q_len, item.k_len)
        steps = cutlass.min(cutlass.max(n_end - n_begin, 0), self.most_steps)
        key = ((self.most_steps - steps) << self.index_bits) | index
        return key if index < lengths.batch else Int32((1 << KEY_BITS) - 1)


@cute.jit
def power_of_two(count: Int32):
    """The least one that is not below ``count``."""
    size = Int32(1)
    while size < count:
        size = size << 1
    return size


@cute.jit
def bitonic_sort(keys, size: Int32, thread: Int32, threads: cutlass.Constexpr):
    """Sort ``size`` keys, a power of two, ascending; by the whole CTA.

    Batcher's network (1968): runs of ``span`` keys, up and down in turns, are merged by comparing keys
    ``distance`` apart.
    """
    span = Int32(2)
    while span <= size:
        distance = span >> 1
        while distance > 0:
            for pair in cutlass.range(thread, size >> 1, threads, unroll=1):
                low = 2 * pair - (pair & (distance - 1))
                first, second = keys[low], keys[low + distance]
                falls = (low & span) != 0
                smaller, larger = cutlass.min(first, second), cutlass.max(first, second)
                keys[low] = larger if falls else smaller
                keys[low + distance] = smaller if falls else larger
            cute.arch.sync_threads()
            distance = distance >> 1
        span = span << 1
