"""The role that keeps the turns of deterministic sums of dQ.

The tiles of keys add to the sums of a query block in one order, told by a counter behind the sums. One warp
waits for the counter and moves it on, for all warps that add: these only wait for its word, which has come
before they need it, and go on while what they have added becomes visible to the next. Where the turn of the
next step has come already, it is granted before this one is given on, which takes thousands of cycles.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import lock
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.shared.key_tiles import key_tile
from attn4.kernels.shared.query_blocks import sums_of_block, sums_of_sequence
from attn4.kernels.shared.stream import next_tile
from attn4.kernels.shared.tiles import END_OF_WORK
from attn4.kernels.shared.walk import Walk
from attn4.kernels.sm90.backward.outlet import lock_of


class Counters(Fixed):
    """The counters of one tile's steps."""

    def __init__(self, plan, lengths, dq_sum, bounds, tile):
        self.plan = plan
        self.bounds = bounds
        self.sums = sums_of_sequence(plan, lengths, dq_sum, tile.batch)
        self.first_head = tile.kv_head * lengths.group

    def of(self, walk):
        """That of a step."""
        return lock_of(self.plan, sums_of_block(self.sums, self.first_head + walk.member, walk.block))

    @cute.jit
    def wait(self, walk):
        """Wait for the turn of a step."""
        if cute.arch.lane_idx() == 0:
            lock.wait(self.of(walk), self.bounds.turn(walk.tile, walk.block))

    @cute.jit
    def has_come(self, walk):
        """Whether the turn of a step has come, for all lanes; no wait."""
        come = Int32(0)
        if cute.arch.lane_idx() == 0:
            come = Int32(lock.now(self.of(walk)) == self.bounds.turn(walk.tile, walk.block))
        return cute.arch.shuffle_sync(come, offset=0) != 0

    @cute.jit
    def give(self, walk):
        """Let the next tile add to what this one has added to in a step."""
        if cute.arch.lane_idx() == 0:
            lock.give(self.of(walk))


@cute.jit
def keep_turns(stream, lengths, dq_sum, bounds: cutlass.Constexpr, ends):
    """The turns of one announced tile after another."""
    stream, record = next_tile(stream)
    while record.row_block != END_OF_WORK:
        tile = key_tile(record, stream.order).uniform()
        if tile.first < tile.last:
            counters = Counters(stream.plan, lengths, dq_sum, bounds, tile)
            walk = Walk(stream.plan, tile, lengths.group)
            # The zeros before the first step are not added, but handed over.
            ends = grant(ends)
            counters.wait(walk)
            ends = grant(ends)
            ends = await_added(ends)
            for _ in cutlass.range(walk.steps - 1, unroll=1):
                following = walk.following()
                come = counters.has_come(following)
                if come:
                    ends = grant(ends)
                ends = await_added(ends)
                counters.give(walk)
                if not come:
                    counters.wait(following)
                    ends = grant(ends)
                walk = following
            ends = await_added(ends)
            counters.give(walk)
        stream, record = next_tile(stream)


@cute.jit
def grant(ends):
    """Let the warps add in one more step."""
    ends.granted.signal()
    ends.granted.advance()
    return ends


def await_added(ends):
    """Wait until the warps have added in the oldest step that was granted."""
    ends.added.wait()
    ends.added.advance()
    return ends
