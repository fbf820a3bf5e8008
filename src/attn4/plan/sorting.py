"""Plans that take the sequences of a batch in sorted order, and of the kernel that sorts them beforehand."""

from __future__ import annotations

from dataclasses import replace

from attn4.plan.layout import Piece, pack
from attn4.plan.plan import Plan, Role, Schedule

MOST_SORTED = 8192
"""Sequences that one CTA sorts, in 32 KB of shared memory; larger batches stay in the order given."""

WARPS = 32


def with_sorted_batches(plan: Plan) -> Plan:
    """``plan``, its sequences in the order that the kernel of ``sorting_plan`` writes."""
    return replace(plan, schedule=replace(plan.schedule, sorted_batches=True))


def sorting_plan(plan: Plan) -> Plan:
    """The plan of the kernel that sorts batches for ``plan``.

    It holds what the work of a sequence depends on and no more, so that plans of several head dimensions and
    dtypes share it.
    """
    return Plan(
        arch=plan.arch,
        direction=plan.direction,
        kernel="sort_batches",
        dtype="bfloat16",
        head_dim=0,
        head_dim_v=0,
        mask=plan.mask,
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        roles=(Role("sort", 0, WARPS, 64, "sorts sequences by the steps of their longest tile"),),
        buffers=pack("shared", (Piece(name="keys", shape=(MOST_SORTED,), dtype="int32"),)),
        channels=(),
        schedule=Schedule(persistent=False),
        pack_gqa=plan.pack_gqa,
        cu_seqlens_q=plan.cu_seqlens_q,
        cu_seqlens_k=plan.cu_seqlens_k,
        seqused_q=plan.seqused_q,
        seqused_k=plan.seqused_k,
        lse=False,
        ping_pong=False,
    )
