"""The loading role: Q, K and V of each tile from global to shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.shared.tiles import END_OF_WORK, read_record


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
    tile = read_record(tiles.words)
    while tile.row_block != END_OF_WORK:
        if tile.n_begin < tile.n_end:
            kv_head = tile.head // tiles.group
            keys = key.of_sequence(kv_head, tile.batch, tile.k_begin, tile.k_len)
            values = value.of_sequence(kv_head, tile.batch, tile.k_begin, tile.k_len)
            queries = query.of_sequence(tile.head, tile.batch, tile.q_begin, tile.q_rows)

            query_out = send(query_out, query, queries, tile.row_block)
            last = tile.n_end - 1
            key_out = send(key_out, key, keys, last)
            for step in cutlass.range(last - tile.n_begin, unroll=1):
                key_out = send(key_out, key, keys, last - 1 - step)
                value_out = send(value_out, value, values, last - step)
            announced.arrive()
            value_out = send(value_out, value, values, tile.n_begin)
        else:
            announced.arrive()
        announced.advance()
        announced.wait()
        tile = read_record(tiles.words)


@cute.jit
def send(producer, rows, tiles, index: Int32):
    """Copy tile ``index`` of a sequence into the next free slot."""
    producer.send(rows, tiles, index)
    return producer
