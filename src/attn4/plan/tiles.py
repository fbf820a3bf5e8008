"""How many tiles and steps a problem is under a plan, and how they fill the SMs."""

from __future__ import annotations

from dataclasses import dataclass

from attn4.machine import Machine
from attn4.mask import Mask
from attn4.plan.plan import Plan
from attn4.problem import Problem


@dataclass(frozen=True, slots=True)
class Tiles:
    """``tiles``: pieces of work, each one CTA's (or one pair's). ``steps``: tile_m x tile_n blocks, all CTAs.

    Keys that two CTAs take, each with its share of the columns, are two tiles. ``longest`` is the most
    steps of one tile, ``full_steps`` what there would be without a mask. A wave is one tile on each SM (or
    pair). With ``cu_seqlens`` or ``seqused`` every sequence counts as the longest.
    """

    tiles: int
    steps: int
    full_steps: int
    longest: int
    slots: int

    @property
    def waves(self) -> float:
        """Tiles for each place where one can run."""
        return self.tiles / self.slots


def count_tiles(problem: Problem, plan: Plan, machine: Machine) -> Tiles:
    """The tiles of ``problem`` under ``plan``.

    Forward, a tile is a block of query rows and its steps are over keys; backward the other way round, for
    each query head of the keys' group.
    """
    forward = plan.direction == "forward"
    queries = (problem.seqlen_q * plan.pack_gqa, plan.tile_m)
    keys = (problem.seqlen_k, plan.tile_n)
    (rows, size), (others, step) = (queries, keys) if forward else (keys, (problem.seqlen_q, plan.tile_m))
    size *= plan.together
    blocks = -(-rows // size)
    heads = problem.batch * (problem.heads // plan.pack_gqa if forward else problem.kv_heads)
    heads *= plan.column_shares
    walks = 1 if forward else problem.group
    lengths = [
        walks * _steps(problem, plan, first, min(first + size, rows) - 1, (others, step))
        for first in range(0, rows, size)
    ]
    return Tiles(
        tiles=blocks * heads,
        steps=sum(lengths) * heads * plan.together,
        full_steps=blocks * -(-others // step) * walks * heads * plan.together,
        longest=max(lengths, default=0),
        slots=machine.sms // plan.together,
    )


def _steps(problem: Problem, plan: Plan, first: int, last: int, other: tuple[int, int]) -> int:
    """Steps of the tile of rows ``first`` to ``last``: blocks of the other side that its mask meets."""
    shift = problem.seqlen_k - problem.seqlen_q
    if plan.direction == "forward":
        return blocks_met(problem.mask, (first // plan.pack_gqa, last // plan.pack_gqa), shift, other)
    # Key j meets the queries from j - shift - right to j - shift + left.
    return blocks_met(Mask(problem.mask.right, problem.mask.left), (first, last), -shift, other)


def blocks_met(mask: Mask, rows: tuple[int, int], shift: int, other: tuple[int, int]) -> int:
    """Blocks of the other side, given as (length, block), that rows first to last meet under ``mask``.

    Row ``i`` meets ``j`` from ``i + shift - left`` to ``i + shift + right``.
    """
    length, step = other
    low = 0 if mask.left is None else max(0, rows[0] + shift - mask.left)
    high = length - 1 if mask.right is None else min(length - 1, rows[1] + shift + mask.right)
    return 0 if high < low else high // step - low // step + 1
