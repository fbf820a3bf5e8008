"""Tiles and steps, counted against every query-key pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.plan.plan import Plan
from attn4.plan.tiles import count_tiles
from attn4.problem import Problem

B200 = machine("B200")
PLAIN = Problem(batch=1, seqlen_q=512, seqlen_k=512, heads=1, kv_heads=1, head_dim=128, head_dim_v=128)


def visible(problem: Problem, query: int, key: int) -> bool:
    """The definition in attn4/mask.py."""
    distance = key - query - problem.seqlen_k + problem.seqlen_q
    left, right = problem.mask.left, problem.mask.right
    return (left is None or distance >= -left) and (right is None or distance <= right)


def brute_force(problem: Problem, plan: Plan) -> list[int]:
    """Steps of each tile, over the contiguous range of blocks from the first to the last visible pair."""
    forward = plan.direction == "forward"
    rows, others = problem.seqlen_q * plan.pack_gqa, problem.seqlen_k
    size, step = plan.tile_m * plan.cta_group, plan.tile_n
    if not forward:
        rows, others, size, step = others, problem.seqlen_q, plan.tile_n * plan.cta_group, plan.tile_m
    counts = []
    for first in range(0, rows, size):
        mine = range(first, min(first + size, rows))
        met = {
            other // step
            for row in mine
            for other in range(others)
            if visible(problem, *((row // plan.pack_gqa, other) if forward else (other, row)))
        }
        counts.append(max(met) - min(met) + 1 if met else 0)
    return counts


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(0, 400),
    keys=st.integers(0, 400),
    left=st.one_of(st.none(), st.integers(-50, 300)),
    right=st.one_of(st.none(), st.integers(-300, 300)),
    direction=st.sampled_from(("forward", "backward")),
)
def test_steps_are_the_blocks_from_the_first_to_the_last_visible_pair(
    queries: int, keys: int, left: int | None, right: int | None, direction: str
) -> None:
    # Where no row sees a key a tile may still take the steps between its rows' empty bands.
    if left is not None and right is not None and left + right < 0:
        right = -left
    problem = replace(PLAIN, seqlen_q=queries, seqlen_k=keys, mask=Mask(left, right), direction=direction)  # type: ignore[arg-type]
    plan = choose(problem, B200)
    expected = brute_force(problem, plan)
    found = count_tiles(problem, plan, B200)
    assert found.tiles == len(expected)
    assert found.steps == sum(expected) * plan.cta_group
    assert found.longest == max(expected, default=0)


def test_an_empty_window_has_no_steps() -> None:
    problem = replace(PLAIN, mask=Mask(0, -4096))
    assert count_tiles(problem, choose(problem, B200), B200).steps == 0


def test_causal_halves_the_steps() -> None:
    long = replace(PLAIN, seqlen_q=16384, seqlen_k=16384, batch=2, heads=3, kv_heads=3)
    causal = replace(long, mask=Mask.of(True))
    found = count_tiles(causal, choose(causal, B200), B200)
    assert found.tiles == 2 * 3 * 64
    assert found.full_steps == 2 * 3 * 64 * 128
    # 64 tiles of 256 rows see 2, 4, ... 128 blocks of 128 keys.
    assert found.steps == 2 * 3 * sum(range(2, 129, 2))
    assert found.waves == pytest.approx(384 / 148)


def test_packed_heads_share_tiles() -> None:
    decode = replace(PLAIN, seqlen_q=1, heads=64, kv_heads=8)
    plan = choose(decode, B200)
    assert plan.pack_gqa == 8
    assert count_tiles(decode, plan, B200).tiles == 8


def test_backward_a_tile_takes_all_query_heads_of_its_keys() -> None:
    grouped = replace(PLAIN, direction="backward", seqlen_q=512, seqlen_k=256, heads=8, kv_heads=2)
    found = count_tiles(grouped, choose(grouped, B200, cta_group=1), B200)
    assert (found.tiles, found.longest) == (2 * 2 * grouped.batch, 4 * 4)
    assert found.steps == found.full_steps == 2 * 4 * 8 * grouped.batch


def test_a_pair_is_one_place_to_run() -> None:
    backward = replace(PLAIN, direction="backward", seqlen_q=1024, seqlen_k=1024)
    found = count_tiles(backward, choose(backward, B200, cta_group=2), B200)
    assert (found.tiles, found.steps, found.slots) == (4, 64, 74)
