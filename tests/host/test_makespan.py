"""The host model of the schedule: what is dealt to whom, and when the last is done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn4.cli import main
from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.plan.explain import explain
from attn4.plan.feeds import Step, feeds
from attn4.plan.launch_control import with_launch_control
from attn4.plan.makespan import alternatives, deal, makespan
from attn4.plan.order import Batch, Sequence, sequence_order, tiles_in_order
from attn4.plan.plan import Plan
from attn4.plan.tiles import count_tiles
from attn4.problem import Problem

B200 = machine("B200")
CAUSAL = Problem(
    batch=2,
    seqlen_q=1024,
    seqlen_k=1024,
    heads=4,
    kv_heads=2,
    head_dim=128,
    head_dim_v=128,
    mask=Mask.of(True),
)
PACKED = replace(CAUSAL, cu_seqlens_q=True, cu_seqlens_k=True)


def packed_plan(name: str) -> Plan:
    return alternatives(choose(PACKED, B200))[name]


def test_whoever_is_free_first_takes_the_next_piece() -> None:
    # By hand: 3 | 1 2 -> 3 | 3, then 4 on the first and 1 on the second.
    assert deal([3, 1, 2, 4, 1], 2) == 7
    assert deal([], 2) == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 8))
def test_no_order_is_later_than_the_mean_and_the_longest_piece(costs: list[int], slots: int) -> None:
    """Graham's bound for list scheduling (1966), and no SM works while all are done."""
    found = deal(costs, slots)
    mean, longest = sum(costs) / slots, max(costs)
    assert max(mean, longest) <= found + 1e-9
    assert found <= mean + longest * (1 - 1 / slots) + 1e-9


def test_the_tiles_are_those_that_are_counted() -> None:
    for problem in (CAUSAL, replace(CAUSAL, mask=Mask(300, 40), seqlen_q=700), replace(CAUSAL, seqlen_q=1)):
        plan = choose(problem, B200)
        tiles = tiles_in_order(plan, Batch.of(problem))
        counted = count_tiles(problem, plan, B200)
        assert len(tiles) == len(set(tiles)) == counted.tiles
        assert sum(tile.steps for tile in tiles) == counted.steps
        assert max(tile.steps for tile in tiles) == counted.longest


def test_a_sorted_batch_begins_with_its_longest_sequence_and_ends_with_the_tail() -> None:
    sequences = tuple(Sequence(n, n, k) for n, k in ((100, 100), (900, 900), (0, 0), (300, 900), (900, 200)))
    batch = Batch(sequences=sequences, heads=2, kv_heads=2, mask=Mask(), rows_k=2100, tail=70)
    plan = packed_plan("sorted")
    assert sequence_order(plan, batch) == [1, 3, 4, 0, 2]
    taken = [tile.batch for tile in tiles_in_order(plan, batch)]
    assert list(dict.fromkeys(taken)) == [1, 3, 4, 0, 5]
    unsorted = [tile.batch for tile in tiles_in_order(packed_plan("longest first"), batch)]
    assert list(dict.fromkeys(unsorted)) == [0, 1, 3, 4, 5]
    assert sorted(taken) == sorted(unsorted)


def test_sorting_helps_where_the_longest_sequence_comes_last() -> None:
    lengths = (64,) * 255 + (8192,)
    batch = Batch.self_attention(lengths, 16, Mask.of(True))
    found = {
        name: makespan(packed_plan(name), B200, batch).ratio for name in alternatives(packed_plan("sorted"))
    }
    assert found["dealt"] > found["linear"] > found["longest first"] > found["sorted"] >= 1
    assert found["longest first"] > 1.15
    assert found["sorted"] < 1.05


def test_tiles_of_ctas_that_cannot_start_come_last_unless_they_are_taken_over() -> None:
    """By hand: tiles of 10, 8, 6, 4 and 2 steps for three CTAs, the last of which finds no free SM."""
    small = replace(B200, sms=3)
    problem = replace(CAUSAL, batch=1, heads=1, kv_heads=1, seqlen_q=1280, seqlen_k=1280)
    plan = choose(problem, small)
    batch = Batch.of(problem)

    def steps(of: Plan, held: int) -> float:
        return makespan(of, small, batch, held=held).cycles / feeds(small, Step.of(plan)).bound

    taken_over, dealt = with_launch_control(plan), alternatives(plan)["dealt"]
    # Nothing held: 10 | 8 + 2 | 6 + 4. Dealt in linear order: 2 + 8 | 4 + 10 | 6.
    assert [steps(each, 0) for each in (plan, taken_over, dealt)] == [10, 10, 14]
    # 10 + 2 + 6 | 8 + 4, where the counter goes on with 4; 10 + 4 + 2 | 8 + 6; 2 + 8 + 6 | 4 + 10.
    assert [steps(each, 1) for each in (plan, taken_over, dealt)] == [18, 16, 16]


def test_explain_prints_the_makespan(capsys: pytest.CaptureFixture[str]) -> None:
    told = explain(CAUSAL, B200)
    own, naive = told.makespans["own"], told.makespans["dealt"]
    plan = choose(CAUSAL, B200)
    # 32 tiles on 148 SMs: the longest, of 8 steps, decides.
    assert own.cycles == own.bound == 8 * feeds(B200, Step.of(plan)).bound
    assert "makespan 8.3 us, 1.00 of the bound" in str(told)
    assert naive.ratio >= 1
    assert explain(replace(CAUSAL, direction="backward"), B200).makespans == {}


def test_explain_compares_the_orders_of_given_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    words = "explain --arch B200 --causal --head-dim 128 --heads 16 --lengths 255x64 8192"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    batch = Batch.self_attention((64,) * 255 + (8192,), 16, Mask.of(True))
    ratios = {name: makespan(packed_plan(name), B200, batch).ratio for name in ("longest first", "sorted")}
    compared = f"; with scheduler metadata {ratios['sorted']:.2f}; dealt in linear order"
    assert f"{ratios['longest first']:.2f} of the bound{compared}" in text
    assert "batch 256, queries 8192, keys 8192" in text
