"""What a tile of keys is, as a backward kernel takes it, and which queries its keys see.

The tiles of keys of a problem are the tiles of queries of the transposed problem, so they are found as those
are, with queries and keys exchanged.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import math
from attn4.kernels.shared.masking import WORD
from attn4.kernels.shared.scheduler import Lengths, TileOrder

NEVER = 1 << 30
"""Past any row index."""


@dataclass(frozen=True)
class KeyTile:
    """One tile: ``key_block`` of the keys of ``kv_head`` and sequence ``batch``.

    The sequence has ``k_rows`` rows to write from ``k_begin`` on, of which the first ``k_len`` are keys; its
    ``q_len`` queries start at ``q_begin``. Query blocks ``first`` to ``last`` - 1 hold all the queries that
    see the tile. Past the last tile ``key_block`` is negative, and there are none. ``descending``, of a plan
    with a turned end: 1 if the tile takes them from the last to the first, else 0.
    """

    key_block: Int32
    kv_head: Int32
    batch: Int32
    k_begin: Int32
    k_rows: Int32
    k_len: Int32
    q_begin: Int32
    q_len: Int32
    first: Int32
    last: Int32
    descending: Int32 | None = None

    def uniform(self) -> KeyTile:
        """The same, known to be equal in all lanes: what a step computes from it is computed once a warp."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return KeyTile(**{n: None if x is None else cute.arch.make_warp_uniform(x) for n, x in values})

    def of_cta(self, ctas: int, rank) -> KeyTile:
        """What CTA ``rank`` of a group has of this tile of the whole group."""
        return dataclasses.replace(self, key_block=self.key_block * ctas + rank)


def first_query_block(plan, tile):
    """Where the steps of a tile, or of each query head of its group, begin."""
    if not plan.schedule.rotated:
        return tile.first
    count = cutlass.max(tile.last - tile.first, 1)
    return tile.first + tile.key_block - tile.key_block // count * count


def following_query_block(tile, block):
    """The query block of the step after ``block``; after the last one the first."""
    following = block + 1
    return following - Int32(following == tile.last) * (tile.last - tile.first)


@dataclass(frozen=True)
class KeyBounds:
    """Which queries see a key: query i sees key j if i - left <= j - shift <= i + right, where shift is the
    number of keys less that of queries. A causal mask is a right bound of 0.

    ``ctas`` of a group have blocks that follow each other, and visit the query blocks of all.
    """

    kind: str
    tile_m: int
    tile_n: int
    left: Int32
    right: Int32
    ctas: int = 1

    @property
    def together(self) -> int:
        """Keys of the CTAs that take the same steps."""
        return self.tile_n * self.ctas

    def begin_query(self, key, q_len, k_len):
        """The first query that sees ``key``; may be negative."""
        begin = key + q_len - k_len
        return begin - self.right if self.kind == "window" else begin

    def end_query(self, key, q_len, k_len):
        """One past the last query that sees ``key`` of a window."""
        return key + q_len - k_len + self.left + 1

    @cute.jit
    def visited(self, key_block, k_len, q_len):
        """Query blocks [first, last) that see some key of a group's block; first = last if none does."""
        first_key = key_block * self.together
        last_key = cutlass.min(first_key + self.together, k_len) - 1
        begin, end = Int32(0), q_len
        if cutlass.const_expr(self.kind != "full"):
            begin = cutlass.max(self.begin_query(first_key, q_len, k_len), 0)
        if cutlass.const_expr(self.kind == "window"):
            end = cutlass.min(self.end_query(last_key, q_len, k_len), q_len)
        end = end if first_key < k_len else Int32(0)
        first = begin // self.tile_m
        last = (cutlass.max(end, 0) + self.tile_m - 1) // self.tile_m
        return first, cutlass.max(first, last)

    @cute.jit
    def hides(self, tile, query_block):
        """Whether some key of the tile is not seen by all queries of the block, or is not a key at all."""
        first_key = tile.key_block * self.tile_n
        last_key = first_key + self.tile_n - 1
        hides = last_key >= tile.k_len
        if cutlass.const_expr(self.kind != "full"):
            begin = self.begin_query(last_key, tile.q_len, tile.k_len)
            hides = hides or query_block * self.tile_m < begin
        if cutlass.const_expr(self.kind == "window"):
            end = self.end_query(first_key, tile.q_len, tile.k_len)
            hides = hides or (query_block + 1) * self.tile_m > end
        return hides

    @cute.jit
    def turn(self, tile, query_block):
        """How many tiles of keys are to be added to the sums of a query block before this one.

        These are those that the grid takes before it, as nobody may wait for a CTA that has not begun: the
        tiles after it, or those before it if it is descending.
        """
        mine = tile.key_block // self.ctas if self.ctas > 1 else tile.key_block
        end = tile.k_len
        if cutlass.const_expr(self.kind != "full"):
            seen = (query_block + 1) * self.tile_m + tile.k_len - tile.q_len
            if cutlass.const_expr(self.kind == "window"):
                seen = seen + self.right
            end = cutlass.min(seen, end)
        turn = (cutlass.max(end, 0) + self.together - 1) // self.together - 1 - mine
        if cutlass.const_expr(tile.descending is not None):
            begin = Int32(0)
            if cutlass.const_expr(self.kind == "window"):
                begin = query_block * self.tile_m + tile.k_len - tile.q_len - self.left
            before = mine - cutlass.max(begin, 0) // self.together
            turn = before if tile.descending != 0 else turn
        return turn

    @cute.jit
    def seen_by(self, tile, key, first_query: Int32):
        """The queries [begin, end) from ``first_query`` on that see row ``key`` of the tile."""
        position = tile.key_block * self.tile_n + key
        begin, end = Int32(0), Int32(NEVER)
        if cutlass.const_expr(self.kind != "full"):
            begin = self.begin_query(position, tile.q_len, tile.k_len) - first_query
        if cutlass.const_expr(self.kind == "window"):
            end = self.end_query(position, tile.q_len, tile.k_len) - first_query
        begin = begin if position < tile.k_len else Int32(NEVER)
        return begin, end


@cute.jit
def mask_queries(values, bounds: cutlass.Constexpr, tile, key, first_query: Int32):
    """Of a thread that has one key and consecutive queries: what the mask hides becomes -inf."""
    begin, end = bounds.seen_by(tile, key, first_query)
    for first in cutlass.range_constexpr(0, cute.size(values), WORD):
        seen = math.bits_from(begin - first)
        if cutlass.const_expr(bounds.kind == "window"):
            seen = seen & ~math.bits_from(end - first)
        for bit in cutlass.range_constexpr(min(WORD, cute.size(values) - first)):
            if cutlass.const_expr(bounds.kind == "full"):
                # All of them or none: one predicate.
                visible = begin <= 0
            else:
                visible = seen & Int32(math.signed_word(1 << bit)) != 0
            values[first + bit] = values[first + bit] if visible else -Float32.inf


def transposed_plan(plan):
    """``plan`` with queries and keys exchanged, as far as tiles are concerned: those of a group are one.

    The longest rows of queries are the last ones, the longest of keys the first.
    """
    turned = {"longest_first": "shortest_first", "shortest_first": "longest_first"}
    order = plan.schedule.order
    schedule = dataclasses.replace(plan.schedule, order=turned.get(order, order))
    return dataclasses.replace(
        plan,
        schedule=schedule,
        tile_m=plan.tile_n * plan.cta_group,
        cta_group=1,
        tile_n=plan.tile_m,
        cu_seqlens_q=plan.cu_seqlens_k,
        cu_seqlens_k=plan.cu_seqlens_q,
        seqused_q=plan.seqused_k,
        seqused_k=plan.seqused_q,
    )


def transposed_lengths(lengths, kv_heads) -> Lengths:
    """``lengths`` with queries and keys exchanged."""
    return Lengths(
        lengths.batch,
        kv_heads,
        Int32(1),
        lengths.rows_k,
        lengths.rows_q,
        lengths.cu_seqlens_k,
        lengths.cu_seqlens_q,
        lengths.seqused_k,
        lengths.seqused_q,
    )


def key_order(plan, bounds, lengths) -> TileOrder:
    """The tiles of keys by number, as records of the transposed problem (see `key_tile`)."""
    turned = transposed_lengths(lengths, lengths.heads // lengths.group)
    return TileOrder(transposed_plan(plan), bounds, turned)


def find_key_tile(plan, bounds, lengths, number: Int32) -> KeyTile:
    """The tile of keys of that number; by one whole warp."""
    order = key_order(plan, bounds, lengths)
    return key_tile(order.find(number), order)


def key_tile(record, order) -> KeyTile:
    """What a record of the transposed problem says, one of ``order``."""
    return KeyTile(
        key_block=record.row_block,
        kv_head=record.head,
        batch=record.batch,
        k_begin=record.q_begin,
        k_rows=record.q_rows,
        k_len=record.q_len,
        q_begin=record.k_begin,
        q_len=record.k_len,
        first=record.n_begin,
        last=record.n_end,
        descending=order.turned(record) if order.plan.schedule.turned_end else None,
    )


def count_key_tiles(plan, lengths):
    """At least as many as there are, so that a grid of them leaves none out; on the host."""
    heads = lengths.heads // lengths.group
    together = plan.tile_n * plan.cta_group
    if plan.cu_seqlens_k:
        return (lengths.rows_k // together + lengths.batch + 1) * heads
    return (lengths.rows_k + together - 1) // together * heads * lengths.batch
