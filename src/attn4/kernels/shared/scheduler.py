"""Which tile comes next: static or from a counter, longest first by L2-sized sections, ragged batches too."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl.carried import Carried, Fixed
from attn4.kernels.dsl.channel import Consumer
from attn4.kernels.shared.tiles import END_OF_WORK, TileRecord

NO_TILE = 2**31 - 1
"""A tile number past all tiles."""


@dataclass(frozen=True)
class Lengths:
    """Where sequences begin and how long they are; a field is None where the plan has no such input.

    ``batch_order`` has ``batch`` + 1 entries: the sequences in the order in which they are taken.
    """

    batch: Int32
    heads: Int32
    group: Int32
    rows_q: Int32
    rows_k: Int32
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    batch_order: cute.Tensor | None = None


class Sequence:
    """The extents of one sequence of the batch."""

    def __init__(self, q_begin, q_rows, q_len, k_begin, k_len):
        self.q_begin = q_begin
        self.q_rows = q_rows
        self.q_len = q_len
        self.k_begin = k_begin
        self.k_len = k_len


@cute.jit
def sequence(lengths, index: Int32):
    """Extents of sequence ``index``; index ``batch`` is the tail of packed rows of no sequence."""
    q_begin = Int32(0)
    q_rows = lengths.rows_q
    k_begin = Int32(0)
    k_len = lengths.rows_k
    real = cutlass.min(index, lengths.batch - 1)
    if cutlass.const_expr(lengths.cu_seqlens_q is not None):
        q_begin = lengths.cu_seqlens_q[cutlass.min(index, lengths.batch)]
        q_end = lengths.cu_seqlens_q[cutlass.min(index + 1, lengths.batch)]
        q_end = q_end if index < lengths.batch else lengths.rows_q
        q_rows = cutlass.max(q_end - q_begin, 0)
    if cutlass.const_expr(lengths.cu_seqlens_k is not None):
        k_begin = lengths.cu_seqlens_k[real]
        k_len = cutlass.max(lengths.cu_seqlens_k[real + 1] - k_begin, 0)
    q_len = q_rows
    if cutlass.const_expr(lengths.seqused_q is not None):
        q_len = cutlass.max(cutlass.min(q_rows, lengths.seqused_q[real]), 0)
    if cutlass.const_expr(lengths.seqused_k is not None):
        k_len = cutlass.max(cutlass.min(k_len, lengths.seqused_k[real]), 0)
    k_len = k_len if index < lengths.batch else Int32(0)
    return Sequence(q_begin, q_rows, q_len, k_begin, k_len)


class TileOrder(Carried):
    """Turns ascending tile numbers into tiles.

    Numbers ascend for a CTA, so a ragged batch is searched onwards from the group of 32 sequences where the
    last tile was found: ``group`` starts at sequence ``base`` and tile ``base_tile``.
    """

    carried = ("base", "base_tile")

    def __init__(self, plan, bounds, lengths):
        self.plan = plan
        self.bounds = bounds
        self.lengths = lengths
        self.base = Int32(0)
        self.base_tile = Int32(0)

    @property
    def ragged(self) -> bool:
        """Whether sequences differ in their number of row blocks."""
        return self.plan.cu_seqlens_q

    @property
    def total(self):
        """The number of tiles, where sequences do not differ in theirs."""
        return self._row_blocks(self.lengths.rows_q) * self.lengths.heads * self.lengths.batch

    @cute.jit
    def find(self, number: Int32):
        """The record of tile ``number``; its row block is ``END_OF_WORK`` past the last tile."""
        if cutlass.const_expr(self.ragged):
            return self._find_ragged(number)
        lengths = self.lengths
        total = self.total
        blocks = self._row_blocks(lengths.rows_q)
        heads = lengths.heads * lengths.batch
        block, joint = self._within(number, blocks, heads, (lengths.rows_k, True))
        batch = joint // lengths.heads
        head = joint - batch * lengths.heads
        return self._record(block, head, self._taken(batch), number < total)

    def _taken(self, place):
        """The sequence at ``place`` of the order; past the last one, the tail."""
        if not self.plan.schedule.sorted_batches:
            return place
        return self.lengths.batch_order[cutlass.min(place, self.lengths.batch)]

    def _row_blocks(self, rows):
        """Row blocks of a head. A pair takes two that follow each other; the last may be past the end."""
        together = self.plan.tile_m * self.plan.cta_group
        return (rows * self.plan.pack_gqa + together - 1) // together * self.plan.cta_group

    def _section(self, heads, rows_k):
        """Of so many heads those worked on together: those whose K and V fit in L2."""
        key_bytes = (self.plan.head_dim + self.plan.head_dim_v) * 2
        fitting = self.plan.schedule.section_bytes // key_bytes // cutlass.max(rows_k, 1)
        # No more than there are: int32 does not hold the tiles of all that would fit.
        return cutlass.min(cutlass.max(fitting, 1) * self.lengths.group, heads)

    def _turned(self, heads, rows_k):
        """How many of the last heads of the launch are taken in the other order."""
        return cutlass.min(self._section(heads, rows_k), heads // 2)

    def turned(self, record):
        """Whether a tile is of those heads; 0 or 1. Of packed sequences the last one has them."""
        lengths = self.lengths
        heads, rows_k = lengths.heads * lengths.batch, lengths.rows_k
        if self.ragged:
            heads, rows_k = lengths.heads, record.k_len
        after = (lengths.batch - record.batch) * lengths.heads - 1 - record.head
        return Int32(after < self._turned(heads, rows_k))

    @cute.jit
    def _within(self, number: Int32, blocks: Int32, heads: Int32, keys):
        """Row block and head of a tile: sections of heads, longest or shortest blocks first, which are the
        last or the first of a sequence. ``keys`` are (rows, whether no other heads come after these).
        """
        rows_k, at_end = keys
        block = number - number // blocks * blocks
        head = number // blocks
        if cutlass.const_expr(self.plan.schedule.order != "linear"):
            first, turns = Int32(0), False
            if cutlass.const_expr(self.plan.schedule.turned_end):
                turned = self._turned(heads, rows_k) if at_end else Int32(0)
                turns = number >= (heads - turned) * blocks
                first = heads - turned if turns else Int32(0)
                number = number - first * blocks
                heads = turned if turns else heads - turned
            section_heads = self._section(heads, rows_k)
            section = number // (section_heads * blocks)
            rest = number - section * section_heads * blocks
            here = cutlass.max(cutlass.min(section_heads, heads - section * section_heads), 1)
            block = rest // here
            if cutlass.const_expr(self.plan.schedule.order == "longest_first"):
                block = blocks - 1 - rest // here
            if cutlass.const_expr(self.plan.schedule.turned_end):
                block = blocks - 1 - block if turns else block
            head = first + section * section_heads + rest - rest // here * here
        return block, head

    @cute.jit
    def _find_ragged(self, number: Int32):
        lengths = self.lengths
        lane = cute.arch.lane_idx()
        last = lengths.batch + 1
        upto, mine = self._tiles_upto(lane)
        total = cute.arch.shuffle_sync(upto, offset=cute.arch.WARP_SIZE - 1)
        while self.base_tile + total <= number and self.base + cute.arch.WARP_SIZE < last:
            self.base += cute.arch.WARP_SIZE
            self.base_tile += total
            upto, mine = self._tiles_upto(lane)
            total = cute.arch.shuffle_sync(upto, offset=cute.arch.WARP_SIZE - 1)
        below = cute.arch.vote_ballot_sync(self.base_tile + upto <= number)
        owner = cute.arch.popc(below)
        valid = owner < cute.arch.WARP_SIZE
        owner = cutlass.min(owner, cute.arch.WARP_SIZE - 1)
        before = cute.arch.shuffle_sync(upto - mine, offset=owner)
        blocks = cutlass.max(cute.arch.shuffle_sync(mine, offset=owner) // lengths.heads, 1)
        batch = self._taken(self.base + owner)
        inside = number - self.base_tile - before
        keys = sequence(lengths, batch).k_len, batch == lengths.batch - 1
        block, head = self._within(inside, blocks, lengths.heads, keys)
        return self._record(block, head, batch, valid)

    @cute.jit
    def _tiles_upto(self, lane: Int32):
        """Tiles of this lane's sequence, and of all sequences of the group up to and with it."""
        index = self.base + lane
        rows = sequence(self.lengths, self._taken(cutlass.min(index, self.lengths.batch))).q_rows
        mine = self._row_blocks(rows) * self.lengths.heads
        mine = mine if index <= self.lengths.batch else Int32(0)
        upto = mine
        for distance in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, offset=1 << distance, mask_and_clamp=0)
            upto = upto + other if lane >= (1 << distance) else upto
        return upto, mine

    @cute.jit
    def _record(self, block: Int32, head: Int32, batch: Int32, valid):
        item = sequence(self.lengths, batch)
        # The CTAs of a pair take the same steps: those of the first.
        first = block // self.plan.cta_group * self.plan.cta_group
        n_begin, n_end = self.bounds.visited(first, item.q_len, item.k_len)
        block = block if valid else Int32(END_OF_WORK)
        return TileRecord(
            block,
            head,
            batch,
            item.q_begin,
            item.q_rows,
            item.q_len,
            item.k_begin,
            item.k_len,
            n_begin,
            n_end,
        )


class Stride(Fixed):
    """Tiles dealt in advance: each CTA takes every so many, beginning with its block index."""

    def next(self, number):
        """The tile number after ``number`` for this CTA. By one whole warp, as all of these."""
        return number + cute.arch.grid_dim()[0]

    def leave(self):
        """Nothing is left behind."""


class Counter(Fixed):
    """Tiles from a counter in global memory, after the first of each CTA."""

    def __init__(self, counter):
        self.counter = counter

    @cute.jit
    def next(self, number: Int32):  # noqa: ARG002 - a stride goes on from it
        """The next tile that nobody has taken."""
        grid = cute.arch.grid_dim()[0]
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = cute.arch.atomic_add(self.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        return grid + cute.arch.shuffle_sync(taken, offset=0)

    @cute.jit
    def leave(self):
        """The last CTA to leave zeroes the counter for the next launch."""
        if cute.arch.lane_idx() == 0:
            left = cute.arch.atomic_add(self.counter.iterator + 1, Int32(1), sem="relaxed", scope="gpu")
            if left == cute.arch.grid_dim()[0] - 1:
                self.counter[0] = Int32(0)
                self.counter[1] = Int32(0)


class TakeOver(Carried):
    """Tiles of CTAs that have not started, taken over: cluster launch control."""

    carried = ("responses",)

    def __init__(self, ring, response):
        self.responses = Consumer(ring)
        self.response = response

    @cute.jit
    def next(self, number: Int32):  # noqa: ARG002 - a stride goes on from it
        """The block index of a CTA that will not start any more; past all tiles if all have started.

        Not to be asked again after that (PTX ISA, clusterlaunchcontrol.try_cancel).
        """
        ring = self.responses.ring
        if cute.arch.lane_idx() == 0:
            barrier = ring.full(self.responses.index)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, ring.channel.transaction_bytes)
            cute.arch.issue_clc_query(barrier, self.response, multicast=False)
        self.responses.wait()
        first, _, _, cancelled = cute.arch.clc_response(self.response)
        # The asynchronous proxy writes the next response when all lanes have read this one.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.responses.advance()
        return first if cancelled != 0 else Int32(NO_TILE)

    def leave(self):
        """Nothing is left behind."""


def tile_source(plan, counter, rings, arena):
    """Where the scheduling role of ``plan`` gets tile numbers from."""
    if plan.schedule.launch_control:
        return TakeOver(rings["response"], arena.pointer("response", Int32))
    return Counter(counter) if plan.schedule.dynamic else Stride()


@cute.jit
def run_schedule(order, source, tile_ring, words):
    """The scheduling role: announce one tile after another, then the end.

    A tile is taken from its ``source`` only once the record is free, that is when the loader is nearly done
    with the tile before it: whoever is first idle gets the next tile.
    """
    number = cute.arch.block_idx()[0]
    working = cutlass.Boolean(True)
    tile_ring.acquire()
    while working:
        record = order.find(number)
        if cute.arch.lane_idx() == 0:
            record.write(words)
        tile_ring.signal()
        tile_ring.advance()
        working = record.row_block != END_OF_WORK
        if working:
            tile_ring.acquire()
            number = source.next(number)
    source.leave()
