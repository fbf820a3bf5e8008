"""The role that keeps the turns of deterministic sums of dQ.

The tiles of keys add to the sums of a query block in one order, told by a counter behind the sums. One warp
waits for the counter and moves it on, for all warps that add: these only wait for its word, which has come
before they need it, and go on while what they have added becomes visible to the next.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import lock
from attn4.kernels.shared.key_tiles import key_tile
from attn4.kernels.shared.query_blocks import sums_of_block, sums_of_sequence
from attn4.kernels.shared.stream import next_tile
from attn4.kernels.shared.tiles import END_OF_WORK
from attn4.kernels.sm90.backward.outlet import lock_of


@cute.jit
def keep_turns(stream, lengths, dq_sum, bounds: cutlass.Constexpr, ends):
    """The turns of one announced tile after another."""
    stream, record = next_tile(stream)
    while record.row_block != END_OF_WORK:
        tile = key_tile(record).uniform()
        if tile.first < tile.last:
            sums = sums_of_sequence(stream.plan, lengths, dq_sum, tile.batch)
            # The zeros before the first step are not added, but handed over.
            ends = grant(ends)
            for member in cutlass.range(lengths.group, unroll=1):
                head = tile.kv_head * lengths.group + member
                for block in cutlass.range(tile.first, tile.last, unroll=1):
                    counter = lock_of(stream.plan, sums_of_block(sums, head, block))
                    if cute.arch.lane_idx() == 0:
                        lock.wait(counter, bounds.turn(tile, block))
                    ends = grant(ends)
                    if cute.arch.lane_idx() == 0:
                        lock.give(counter)
        stream, record = next_tile(stream)


@cute.jit
def grant(ends):
    """Let the warps add, and wait until they have."""
    ends.granted.signal()
    ends.granted.advance()
    ends.added.wait()
    ends.added.advance()
    return ends
