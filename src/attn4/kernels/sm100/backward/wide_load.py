"""The loading role where tiles arrive in parts of their columns: K and V once, then what each step needs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.shared.key_tiles import first_query_block, following_query_block
from attn4.kernels.shared.query_blocks import first_block


@cute.jit
def load(plan: cutlass.Constexpr, tile, lengths, tiles, stats, ends):
    """K and V, then Q, statistics and dO of each query block, of one head after the other."""
    if tile.first < tile.last:
        ends.value = send_keys(tiles["value"], tile, ends.value)
        if cutlass.const_expr(plan.column_shares > 1):
            ends.key_other = send_keys(tiles["key_other"], tile, ends.key_other)
        ends.key = send_keys(tiles["key"], tile, ends.key)
        offset = first_block(plan, lengths, tile.batch)
        block = first_query_block(plan, tile)
        for member in cutlass.range(lengths.group, unroll=1):
            head = tile.kv_head * lengths.group + member
            for _ in cutlass.range(tile.last - tile.first, unroll=1):
                for part in cutlass.range_constexpr(plan.column_shares):
                    ends.query = send_queries(tiles["query"][part], tile, head, block, ends.query)
                # Slots need no barrier to come back: one is there for each block of Q, after it.
                ends.row_stats.expect()
                stats.copy(head, offset + block, ends.row_stats.index, ends.row_stats.barrier)
                ends.row_stats.advance()
                for part in cutlass.range_constexpr(plan.column_shares):
                    ends.dout = send_queries(tiles["dout"][part], tile, head, block, ends.dout)
                if cutlass.const_expr(plan.column_shares > 1):
                    # The second block of Q goes where these keys were.
                    ends.kept_keys.wait()
                block = following_query_block(tile, block)


@cute.jit
def send_queries(rows, tile, head: Int32, block: Int32, end):
    """A part of a block of Q or dO."""
    end.send(rows, rows.of_sequence(head, tile.batch, tile.q_begin, tile.q_len), block)
    return end


@cute.jit
def send_keys(parts, tile, end):
    """The parts of K or V, which are loaded once."""
    for part in cutlass.range_constexpr(len(parts)):
        rows = parts[part]
        end.expect()
        rows.copy(
            rows.of_sequence(tile.kv_head, tile.batch, tile.k_begin, tile.k_len),
            tile.key_block,
            end.index,
            end.barrier,
        )
        end.advance()
    return end
