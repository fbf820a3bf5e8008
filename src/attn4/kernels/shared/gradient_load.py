"""The loading role of a backward kernel: K and V once, then what each step of queries needs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import bulk
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.shared.key_tiles import first_query_block, following_query_block

KEYS = ("key", "value", "peer_key")
"""Tiles of the keys' rows, copied once; the last only in a cluster."""


class RowStats(Fixed):
    """Statistics of the query blocks of a sequence: ``sources``, each (heads, blocks, rows) in global memory,
    and ``slots`` (rows, sources, slots) in shared memory.
    """

    def __init__(self, sources, slots):
        self.sources = sources
        self.slots = slots

    @cute.jit
    def copy(self, head: Int32, block: Int32, slot, barrier):
        """Start the copies of one block; by one warp."""
        rows = cute.size(self.slots, mode=[0])
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(self.sources)):
                source = self.sources[i][head, block, None]
                target = self.slots[None, i, slot]
                bulk.load(target.iterator, source.iterator, rows * source.element_type.width // 8, barrier)


@cute.jit
def load(plan: cutlass.Constexpr, tile, group: Int32, tiles, stats, ends):
    """K and V once, then Q, dO and their statistics of each query block, of one head after the other."""
    if tile.first < tile.last:
        for i in cutlass.range_constexpr(len(KEYS)):
            if cutlass.const_expr(KEYS[i] not in tiles):
                continue
            rows, end = tiles[KEYS[i]], getattr(ends, KEYS[i])
            end.expect()
            rows.copy(
                rows.of_sequence(tile.kv_head, tile.batch, tile.k_begin, tile.k_len),
                tile.key_block,
                Int32(0),
                end.barrier,
            )
        block = first_query_block(plan, tile)
        for member in cutlass.range(group, unroll=1):
            head = tile.kv_head * group + member
            queries = tiles["query"].of_sequence(head, tile.batch, tile.q_begin, tile.q_len)
            douts = tiles["dout"].of_sequence(head, tile.batch, tile.q_begin, tile.q_len)
            for _ in cutlass.range(tile.last - tile.first, unroll=1):
                ends.query.send(tiles["query"], queries, block)
                # These slots need no barrier to come back: they are as many as those of Q, and come after it.
                ends.row_stats.expect()
                stats.copy(head, block, ends.row_stats.index, ends.row_stats.barrier)
                ends.row_stats.advance()
                ends.dout.send(tiles["dout"], douts, block)
                block = following_query_block(tile, block)
