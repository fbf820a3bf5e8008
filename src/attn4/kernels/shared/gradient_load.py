"""The loading roles of a backward kernel: K and V of a tile, and what each step of queries needs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl import bulk
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.shared.key_tiles import first_query_block, following_query_block, key_tile
from attn4.kernels.shared.query_blocks import first_block
from attn4.kernels.shared.stream import hold_tile, next_tile, release_tile
from attn4.kernels.shared.tiles import END_OF_WORK
from attn4.kernels.shared.walk import Walk


class RowStats(Fixed):
    """Statistics of query blocks: ``sources``, each (heads, blocks, rows) in global memory, and ``slots``
    (rows, sources, slots) in shared memory.
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
def load(plan: cutlass.Constexpr, tile, lengths, tiles, stats, ends):
    """All of the one tile of a CTA."""
    ends = load_keys(tile, tiles, ends)
    load_queries(plan, tile, lengths, tiles, stats, ends)


@cute.jit
def load_keys(tile, tiles, ends, names: cutlass.Constexpr = ("key", "value")):
    """K and V of a tile, in the order of their ``names``."""
    if tile.first < tile.last:
        for i in cutlass.range_constexpr(len(names)):
            ends = send_keys(tile, tiles[names[i]], ends, names[i])
    return ends


def send_keys(tile, rows, ends, name: str):
    """The rows of a tile of keys, by the end of that name."""
    place = (tile.kv_head, tile.batch, tile.k_begin, tile.k_len)
    getattr(ends, name).send(rows, rows.of_sequence(*place), tile.key_block)
    return ends


@cute.jit
def load_queries(plan: cutlass.Constexpr, tile, lengths, tiles, stats, ends):
    """Q, dO and their statistics of each query block that sees the tile."""
    if cutlass.const_expr(plan.schedule.turned_end):
        ends = load_by_block(plan, tile, lengths, tiles, stats, ends)
    elif tile.first < tile.last:
        offset = first_block(plan, lengths, tile.batch)
        block = first_query_block(plan, tile)
        for member in cutlass.range(lengths.group, unroll=1):
            head = tile.kv_head * lengths.group + member
            rows = rows_of_head(tiles, tile, head)
            for _ in cutlass.range(tile.last - tile.first, unroll=1):
                ends = load_step(tiles, rows, stats, (head, offset, block), ends)
                block = following_query_block(tile, block)
    return ends


@cute.jit
def load_by_block(plan: cutlass.Constexpr, tile, lengths, tiles, stats, ends):
    """The same in the order of a plan with a turned end: all heads of a block, then those of the next."""
    if tile.first < tile.last:
        offset = first_block(plan, lengths, tile.batch)
        walk = Walk(plan, tile, lengths.group)
        for _ in cutlass.range(walk.steps, unroll=1):
            head = tile.kv_head * lengths.group + walk.member
            rows = rows_of_head(tiles, tile, head)
            ends = load_step(tiles, rows, stats, (head, offset, walk.block), ends)
            walk = walk.following()
    return ends


def rows_of_head(tiles, tile, head):
    """Q and dO of a query head, to be sent."""
    place = (head, tile.batch, tile.q_begin, tile.q_len)
    return tiles["query"].of_sequence(*place), tiles["dout"].of_sequence(*place)


def load_step(tiles, rows, stats, place, ends):
    """Q, dO and statistics of (head, first block of the sequence, block of it)."""
    (queries, douts), (head, offset, block) = rows, place
    ends.query.send(tiles["query"], queries, block)
    # Where these slots are as many as those of Q, which they follow, no barrier gives them back.
    ends.row_stats.acquire()
    ends.row_stats.expect()
    stats.copy(head, offset + block, ends.row_stats.index, ends.row_stats.barrier)
    ends.row_stats.advance()
    ends.dout.send(tiles["dout"], douts, block)
    return ends


@cute.jit
def follow_keys(stream, tiles, ends):
    """K and V of one announced tile after another."""
    stream, record = next_tile(stream)
    while record.row_block != END_OF_WORK:
        ends = load_keys(key_tile(record, stream.order), tiles, ends)
        stream, record = next_tile(stream)


@cute.jit
def follow_queries(stream, lengths, tiles, stats, ends):
    """Q, dO and their statistics for one announced tile after another.

    The next tile is taken only when all of one has been asked for (see `hold_tile`).
    """
    stream, record = hold_tile(stream)
    while record.row_block != END_OF_WORK:
        ends = load_queries(stream.plan, key_tile(record, stream.order), lengths, tiles, stats, ends)
        stream = release_tile(stream)
        stream, record = hold_tile(stream)
