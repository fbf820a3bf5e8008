"""How much memory the kernels of a backward pass need between them: the layout that they agree on.

Queries are kept in blocks of ``tile_m`` rows, the last block of a sequence filled up. Sequence b of packed
queries begins at block ``cu_seqlens_q[b] // tile_m + b``, which leaves each the blocks it needs; a batch of
equal lengths has no gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn4.plan.plan import Plan

LOCK_ELEMENTS = 32
"""Room for locks, so that blocks still begin at 128 bytes."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Shapes of float32 tensors, contiguous; the kernels initialise all that they read.

    ``row_stats`` is the shape of ``minus_lse`` and of ``minus_delta``: (heads, blocks, rows of a block).
    ``dq_sum`` is (heads, blocks, elements of a block), in the order of `kernels/shared/sums.py`. With a
    deterministic plan a block ends with ``LOCK_ELEMENTS`` more, which begin with an int32, on Hopper with one
    for each warp that adds: how many tiles of keys have been added.
    """

    row_stats: tuple[int, int, int]
    dq_sum: tuple[int, int, int]


def workspace(plan: Plan, batch: int, heads: int, rows_q: int) -> Workspace:
    """What one call needs; ``rows_q`` are the rows of the query tensor, those of all sequences if packed."""
    blocks = query_blocks(plan, batch, rows_q)
    return Workspace((heads, blocks, plan.tile_m), (heads, blocks, block_elements(plan)))


def block_elements(plan: Plan) -> int:
    """Elements of a block of sums, its lock included."""
    return plan.tile_m * plan.head_dim + (LOCK_ELEMENTS if plan.deterministic else 0)


def query_blocks(plan: Plan, batch: int, rows_q: int) -> int:
    """Blocks of queries that the workspaces have room for; one sequence more is the tail of packed rows."""
    if plan.cu_seqlens_q:
        return rows_q // plan.tile_m + batch + 1
    return batch * -(-rows_q // plan.tile_m)
