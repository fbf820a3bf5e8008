"""The loading role of a pair of CTAs: what each step needs, in the order in which its slots come back."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.shared.key_tiles import following_query_block
from attn4.kernels.shared.query_blocks import first_block

EACH_STEP = ("query", "query_columns", "dout", "dout_columns")


@cute.jit
def load_in_pair(plan: cutlass.Constexpr, tile, lengths, tiles, stats, ends):
    """K and V once, then Q, dO and their statistics of each query block, of one head after the other.

    The columns of Q are for dK, whose product comes after the next S: they are sent a step late.
    """
    steps = tile.last - tile.first
    if steps > 0:
        send_keys(plan, tile, tiles, ends)
        offset = first_block(plan, lengths, tile.batch)
        head, block = tile.kv_head * lengths.group, tile.first
        last_head, last_block = head, block
        for number in cutlass.range(lengths.group * steps, unroll=1):
            queries, douts, dout_columns = [
                tiles[name].of_sequence(head, tile.batch, tile.q_begin, tile.q_len)
                for name in ("query", "dout", "dout_columns")
            ]
            ends.query.send(tiles["query"], queries, block)
            if number > 0:
                ends = send_query_columns(tile, tiles, ends, last_head, last_block)
            # These slots need no barrier to come back: their readers have been waited for (see the plan).
            ends.row_stats.expect()
            stats.copy(head, offset + block, ends.row_stats.index, ends.row_stats.barrier)
            ends.row_stats.advance()
            ends.dout.send(tiles["dout"], douts, block)
            ends.dout_columns.send(tiles["dout_columns"], dout_columns, block)
            last_head, last_block = head, block
            head = head + Int32(block + 1 == tile.last)
            block = following_query_block(tile, block)
        ends = send_query_columns(tile, tiles, ends, last_head, last_block)
        # The leader's commits still arrive here.
        for name in cutlass.range_constexpr(len(EACH_STEP)):
            getattr(ends, EACH_STEP[name]).drain()


@cute.jit
def send_keys(plan: cutlass.Constexpr, tile, tiles, ends):
    """The operands that stay: K, its columns of the keys of both CTAs, and V."""
    for name in ("key", "value", "key_columns"):
        rows = tiles[name]
        end = getattr(ends, name)
        end.expect()
        block = (
            tile.key_block // plan.cta_group if cutlass.const_expr(name == "key_columns") else tile.key_block
        )
        rows.copy(
            rows.of_sequence(tile.kv_head, tile.batch, tile.k_begin, tile.k_len), block, Int32(0), end.barrier
        )


@cute.jit
def send_query_columns(tile, tiles, ends, head: Int32, block: Int32):
    """The columns of a block of queries."""
    rows = tiles["query_columns"]
    ends.query_columns.send(rows, rows.of_sequence(head, tile.batch, tile.q_begin, tile.q_len), block)
    return ends
