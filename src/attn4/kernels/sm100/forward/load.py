"""The loading role: Q, K and V of each tile from global to shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.shared.stream import hold_tile, release_tile
from attn4.kernels.shared.tiles import END_OF_WORK


@cute.jit
def load(stream, group: Int32, row_tiles, ends):
    """Follow the tiles; keys come as many steps before values as a query tile has score slots, as products
    take them. The tile's record is released only after all but the last copy.

    Where the output leaves through the query's slots these change hands for every tile, keys or none.
    """
    plan = stream.plan
    ahead = plan.score_stages
    query, key, value = row_tiles
    stream, tile = hold_tile(stream)
    while tile.row_block != END_OF_WORK:
        if tile.n_begin < tile.n_end:
            kv_head = tile.head // group
            keys = key.of_sequence(kv_head, tile.batch, tile.k_begin, tile.k_len)
            values = value.of_sequence(kv_head, tile.batch, tile.k_begin, tile.k_len)
            queries = query.of_sequence(tile.head, tile.batch, tile.q_begin, tile.q_rows)
            last = tile.n_end - 1
            first_row_tile = tile.row_block * plan.query_tiles
            ends = send(ends, "query", query, queries, first_row_tile)
            ends = send(ends, "key", key, keys, last)
            if cutlass.const_expr(plan.query_tiles == 2):
                ends = send(ends, "query", query, queries, first_row_tile + 1)
            steps = tile.n_end - tile.n_begin
            if cutlass.const_expr(ahead > 1):
                for step in cutlass.range(cutlass.min(steps, ahead) - 1, unroll=1):
                    ends = send(ends, "key", key, keys, last - 1 - step)
            for step in cutlass.range(steps - ahead, unroll=1):
                ends = send(ends, "value", value, values, last - step)
                ends = send(ends, "key", key, keys, last - ahead - step)
            if cutlass.const_expr(ahead > 1):
                rest = cutlass.min(steps, ahead) - 1
                for step in cutlass.range(rest, unroll=1):
                    ends = send(ends, "value", value, values, tile.n_begin + rest - step)
            stream = release_tile(stream)
            ends = send(ends, "value", value, values, tile.n_begin)
        else:
            stream = release_tile(stream)
            if cutlass.const_expr(plan.output_in_query and plan.may_lack_keys):
                for _ in cutlass.range_constexpr(plan.query_tiles):
                    ends.query.acquire()
                    ends.query.skip()
                    ends.query.advance()
        stream, tile = hold_tile(stream)
    if cutlass.const_expr(plan.cta_group > 1):
        # The leader's commits still arrive here.
        for name in ends.carried:
            getattr(ends, name).drain()


@cute.jit
def send(ends, name: cutlass.Constexpr, rows, tiles, index: Int32):
    """Copy tile ``index`` of a sequence into the next free slot of the ring of ``name``."""
    ends.ring(name).send(rows, tiles, index)
    return ends
