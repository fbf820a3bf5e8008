"""The loading role where tiles arrive in parts of their columns: K and V once, then what each step needs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.shared.key_tiles import first_query_block, following_query_block
from attn4.kernels.shared.query_blocks import first_block


@cute.jit
def load(plan: cutlass.Constexpr, tile, lengths, tiles, stats, ends):
    """K and V, then dO, Q and statistics of each query block, of one head after the other.

    dO before Q: dP is the first product of a step, as the last one of the step before still needs Q.
    """
    if tile.first < tile.last:
        ends.value = send_keys(tiles["value"], tile, ends.value)
        ends.key = send_keys(tiles["key"], tile, ends.key)
        offset = first_block(plan, lengths, tile.batch)
        block = first_query_block(plan, tile)
        for member in cutlass.range(lengths.group, unroll=1):
            head = tile.kv_head * lengths.group + member
            for _ in cutlass.range(tile.last - tile.first, unroll=1):
                for part in cutlass.range_constexpr(plan.column_shares):
                    rows = tiles["dout"][part]
                    ends.dout.send(rows, rows.of_sequence(head, tile.batch, tile.q_begin, tile.q_len), block)
                for part in cutlass.range_constexpr(plan.column_shares):
                    rows = tiles["query"][part]
                    ends.query.send(rows, rows.of_sequence(head, tile.batch, tile.q_begin, tile.q_len), block)
                # Slots need no barrier to come back: one is there for each block of Q, after it.
                ends.row_stats.expect()
                stats.copy(head, offset + block, ends.row_stats.index, ends.row_stats.barrier)
                ends.row_stats.advance()
                block = following_query_block(tile, block)


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
