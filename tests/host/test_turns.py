"""Waiting for turns in the deterministic backward pass: the model, by hand and against the post's claim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.plan.turns import LATENCY, ORDERS, Order, query_blocks, tiles, turns, walk
from attn4.problem import Problem

B200 = machine("B200")
STEP = 3328
"""Cycles of a step at head dimension 128: shared memory binds."""

PROBLEM = Problem(
    batch=1,
    seqlen_q=256,
    seqlen_k=256,
    heads=1,
    kv_heads=1,
    head_dim=128,
    head_dim_v=128,
    direction="backward",
    deterministic=True,
)


def model(problem: Problem, order: str):
    return turns(problem, choose(problem, B200, cta_group=1), B200, ORDERS[order])


def test_two_tiles_that_add_to_one_block_take_turns() -> None:
    found = model(replace(PROBLEM, seqlen_q=128), "naive")
    assert (found.cycles, found.waiting, found.working) == (STEP + LATENCY, LATENCY, 2 * STEP)


@pytest.mark.parametrize(("order", "waiting"), [("naive", STEP + LATENCY), ("shortest first", 0)])
def test_under_a_causal_mask_the_last_keys_have_added_before_others_come(order: str, waiting: int) -> None:
    found = model(replace(PROBLEM, mask=Mask.of(True)), order)
    assert found.waiting == waiting
    assert found.cycles == max(STEP + waiting, 2 * STEP)


def test_heads_of_a_group_have_sums_of_their_own() -> None:
    found = model(replace(PROBLEM, seqlen_q=128, seqlen_k=128, heads=2), "naive")
    assert (found.waiting, found.cycles) == (0, 2 * STEP)


def test_a_deterministic_plan_takes_the_last_keys_first_heads_side_by_side() -> None:
    plan = choose(replace(PROBLEM, heads=2, kv_heads=2), B200, cta_group=1)
    assert Order.of(plan) == ORDERS["shortest first, interleaved"]
    assert list(tiles(replace(PROBLEM, heads=2, kv_heads=2), plan, Order.of(plan))) == [
        (1, 0), (1, 1), (0, 0), (0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("length", "batch"), [(1024, 16), (4096, 4), (16384, 1)])
def test_a_turned_end_makes_up_for_the_longest_tiles_at_the_end(length: int, batch: int) -> None:
    """Within 1.5% of the longest tiles first without turns; without it 4 to 7% slower."""
    where = machine("H200")
    problem = replace(PROBLEM, seqlen_q=length, seqlen_k=length, heads=16, kv_heads=16, batch=batch)
    problem = replace(problem, mask=Mask.of(True))
    plan = choose(problem, where)
    other = choose(replace(problem, deterministic=False), where)
    free = turns(problem, other, where, Order.of(other), lock=False).cycles
    assert turns(problem, plan, where, Order.of(plan)).cycles < 1.015 * free
    assert turns(problem, plan, where, replace(Order.of(plan), turned_end=False)).cycles > 1.04 * free


def test_a_turned_head_takes_the_heads_of_its_group_block_by_block() -> None:
    problem = replace(PROBLEM, heads=4, kv_heads=2, mask=Mask.of(True))
    plan = choose(problem, machine("H200"))
    steps = [list(walk(problem, plan, Order.of(plan), (1, head))) for head in range(2)]
    assert steps == [[(0, 2), (1, 2), (0, 3), (1, 3)], [(0, 3), (1, 3), (0, 2), (1, 2)]]


def test_a_window_bounds_the_query_blocks_on_both_sides() -> None:
    problem = replace(PROBLEM, seqlen_q=512, seqlen_k=512, mask=Mask(100, 0))
    plan = choose(problem, B200, cta_group=1)
    assert [list(query_blocks(problem, plan, block)) for block in range(4)] == [[0, 1], [1, 2], [2, 3], [3]]


@pytest.mark.parametrize("mask", [Mask(), Mask.of(True)], ids=lambda mask: mask.kind)
def test_turns_cost_less_than_the_post_says_and_the_naive_order_more(mask: Mask) -> None:
    """85 to 90% of the speed without turns (FlashAttention-4)."""
    problem = replace(PROBLEM, batch=4, seqlen_q=4096, seqlen_k=4096, heads=16, kv_heads=16, mask=mask)
    plan = choose(problem, B200, cta_group=1)
    other = choose(replace(problem, deterministic=False), B200, cta_group=1)
    free = turns(problem, other, B200, Order.of(other), lock=False)
    assert free.cycles / turns(problem, plan, B200, Order.of(plan)).cycles > 0.9
    assert free.cycles / turns(problem, plan, B200, ORDERS["naive"]).cycles < 0.85
