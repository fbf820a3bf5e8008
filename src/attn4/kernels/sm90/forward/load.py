"""The loading role: Q, K and V of each tile from global to shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.shared.tiles import END_OF_WORK, TileRecord


@cute.jit
def load(tiles, row_tiles, channels):
    """Follow the announced tiles; keys come one block ahead of values, as ``attend`` consumes them.

    The record is released only after all but the last copy: the scheduler then takes the next tile as late as
    its latency allows. Taken at the start, a long tile would hold back another that an idle CTA could run
    (16k causal on an H200: 9% at D 128, 15% at D 256).
    """
    query, key, value = row_tiles
    announced, query_out, key_out, value_out = channels
    announced.wait()
    tile = TileRecord.read(tiles.words)
    while tile.row_block != END_OF_WORK:
        if tile.n_begin < tile.n_end:
            kv_head = tile.head // tiles.group
            keys = key.of_sequence(kv_head, tile.batch, tile.k_begin, tile.k_len)
            values = value.of_sequence(kv_head, tile.batch, tile.k_begin, tile.k_len)
            queries = query.of_sequence(tile.head, tile.batch, tile.q_begin, tile.q_rows)

            query_slot = query_out.acquire()
            query_out.expect()
            query.copy(queries, tile.row_block, query_slot, query_out.barrier)
            query_out.advance()
            last = tile.n_end - 1
            key_slot = key_out.acquire()
            key_out.expect()
            key.copy(keys, last, key_slot, key_out.barrier)
            key_out.advance()
            for step in cutlass.range(tile.n_end - tile.n_begin - 1, unroll=1):
                key_slot = key_out.acquire()
                key_out.expect()
                key.copy(keys, last - 1 - step, key_slot, key_out.barrier)
                key_out.advance()
                value_slot = value_out.acquire()
                value_out.expect()
                value.copy(values, last - step, value_slot, value_out.barrier)
                value_out.advance()
            announced.arrive()
            value_slot = value_out.acquire()
            value_out.expect()
            value.copy(values, tile.n_begin, value_slot, value_out.barrier)
            value_out.advance()
        else:
            announced.arrive()
        announced.advance()
        announced.wait()
        tile = TileRecord.read(tiles.words)
