"""In which order a plan takes the tiles of a batch: what ``kernels/shared/scheduler.py`` does, on the host.

A test holds the two to each other, tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attn4.mask import Mask
from attn4.plan.plan import Plan
from attn4.plan.tiles import blocks_met
from attn4.problem import Problem

ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: ``q_rows`` rows to write, of which the first ``q_len`` are queries; ``k_len`` keys."""

    q_rows: int
    q_len: int
    k_len: int


@dataclass(frozen=True, slots=True)
class Tile:
    """A row block of a head of a sequence, and the key blocks that it visits."""

    row_block: int
    head: int
    batch: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The work of one forward call. ``tail``: packed rows after the last sequence, which are written too.

    ``rows_k`` is the length of the tensor of keys; packed, that is the total.
    """

    sequences: tuple[Sequence, ...]
    heads: int
    kv_heads: int
    mask: Mask
    rows_k: int
    tail: int = 0

    @classmethod
    def of(cls, problem: Problem) -> Batch:
        """Of a problem whose sequences are all as long as its longest."""
        one = Sequence(problem.seqlen_q, problem.seqlen_q, problem.seqlen_k)
        return cls(
            sequences=(one,) * problem.batch,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            mask=problem.mask,
            rows_k=problem.seqlen_k * (problem.batch if problem.cu_seqlens_k else 1),
        )

    @classmethod
    def self_attention(cls, lengths: tuple[int, ...], heads: int, mask: Mask) -> Batch:
        """Of packed sequences of these lengths, as many key/value heads as query heads."""
        sequences = tuple(Sequence(length, length, length) for length in lengths)
        return cls(sequences=sequences, heads=heads, kv_heads=heads, mask=mask, rows_k=sum(lengths))


def tiles_in_order(plan: Plan, batch: Batch) -> list[Tile]:
    """The tiles of ``batch`` by their number, the first taken first. Forward plans only."""
    order = sequence_order(plan, batch) if plan.schedule.sorted_batches else range(len(batch.sequences))
    heads = batch.heads // plan.pack_gqa
    if plan.cu_seqlens_q:
        places = [*((index, batch.sequences[index]) for index in order)]
        places.append((len(batch.sequences), Sequence(batch.tail, batch.tail, 0)))
        return [
            _tile(plan, batch, (block, head, index))
            for index, one in places
            for block, head in _within(plan, batch, row_blocks(plan, one.q_rows), (heads, one.k_len))
        ]
    rows = batch.sequences[0].q_rows if batch.sequences else 0
    joint = (heads * len(batch.sequences), batch.rows_k)
    return [
        _tile(plan, batch, (block, both % heads, order[both // heads]))
        for block, both in _within(plan, batch, row_blocks(plan, rows), joint)
    ]


def tile_count(plan: Plan, batch: Batch) -> int:
    """How many tiles ``batch`` has."""
    rows = [one.q_rows for one in batch.sequences] + [batch.tail]
    return batch.heads // plan.pack_gqa * sum(row_blocks(plan, each) for each in rows)


def sequence_order(plan: Plan, batch: Batch) -> list[int]:
    """The sequences, those whose last queries visit most key blocks first; equal ones by their index."""

    def work(index: int) -> int:
        one = batch.sequences[index]
        return visited(plan, batch.mask, max(row_blocks(plan, one.q_len) - 1, 0), one)

    return sorted(range(len(batch.sequences)), key=lambda index: -work(index))


def row_blocks(plan: Plan, rows: int) -> int:
    """Row blocks of a head with so many query rows."""
    return -(-rows * plan.pack_gqa // (plan.tile_m * plan.cta_group))


def visited(plan: Plan, mask: Mask, row_block: int, one: Sequence) -> int:
    """How many key blocks a row block of a sequence visits."""
    size = plan.tile_m * plan.cta_group
    first = row_block * size // plan.pack_gqa
    last = min(((row_block + 1) * size - 1) // plan.pack_gqa, one.q_len - 1)
    if first >= one.q_len:
        return 0
    return blocks_met(mask, (first, last), one.k_len - one.q_len, (one.k_len, plan.tile_n))


def _tile(plan: Plan, batch: Batch, place: tuple[int, int, int]) -> Tile:
    row_block, head, index = place
    real = index < len(batch.sequences)
    steps = visited(plan, batch.mask, row_block, batch.sequences[index]) if real else 0
    return Tile(row_block, head, index, steps)


def _within(plan: Plan, batch: Batch, blocks: int, joint: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(row block, head) of heads with so many keys each: sections of heads whose K and V fit in L2."""
    heads, rows_k = joint
    if plan.schedule.order == "linear":
        yield from ((block, head) for head in range(heads) for block in range(blocks))
        return
    key_bytes = (plan.head_dim + plan.head_dim_v) * ELEMENT_BYTES
    group = batch.heads // plan.pack_gqa // batch.kv_heads
    together = max(plan.schedule.section_bytes // key_bytes // max(rows_k, 1), 1) * group
    for first in range(0, heads, together):
        section = range(first, min(first + together, heads))
        ascending = plan.schedule.order == "shortest_first"
        for block in range(blocks) if ascending else reversed(range(blocks)):
            yield from ((block, head) for head in section)
