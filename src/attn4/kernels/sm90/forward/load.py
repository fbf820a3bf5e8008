"""The loading role: Q, K and V of each tile from global to shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.shared.stream import hold_tile, release_tile
from attn4.kernels.shared.tiles import END_OF_WORK


@cute.jit
def load(stream, group: Int32, row_tiles, channels):
    """Follow the announced tiles; keys come one block ahead of values, as ``attend`` consumes them.

    The tile's record is released only after all but the last copy.
    """
    query, key, value = row_tiles
    query_out, key_out, value_out = channels
    stream, tile = hold_tile(stream)
    while tile.row_block != END_OF_WORK:
        if tile.n_begin < tile.n_end:
            kv_head = tile.head // group
            keys = key.of_sequence(kv_head, tile.batch, tile.k_begin, tile.k_len)
            values = value.of_sequence(kv_head, tile.batch, tile.k_begin, tile.k_len)
            queries = query.of_sequence(tile.head, tile.batch, tile.q_begin, tile.q_rows)

            query_out = send(query_out, query, queries, tile.row_block)
            last = tile.n_end - 1
            key_out = send(key_out, key, keys, last)
            for step in cutlass.range(last - tile.n_begin, unroll=1):
                key_out = send(key_out, key, keys, last - 1 - step)
                value_out = send(value_out, value, values, last - step)
            stream = release_tile(stream)
            value_out = send(value_out, value, values, tile.n_begin)
        else:
            stream = release_tile(stream)
        stream, tile = hold_tile(stream)


@cute.jit
def send(producer, rows, tiles, index: Int32):
    """Copy tile ``index`` of a sequence into the next free slot."""
    producer.send(rows, tiles, index)
    return producer
