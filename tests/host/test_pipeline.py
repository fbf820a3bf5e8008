"""The model of a step's products: what waits for what, and how the orders of a pair compare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn4.machine import machine
from attn4.plan.choose import choose
from attn4.plan.feeds import Step, feeds
from attn4.plan.pipeline import EXCHANGES, cycles, table
from attn4.problem import Problem

B200 = machine("B200")
BACKWARD = Problem(
    batch=1,
    seqlen_q=4096,
    seqlen_k=4096,
    heads=8,
    kv_heads=8,
    head_dim=128,
    head_dim_v=128,
    direction="backward",
)
SINGLE, PAIR = (choose(BACKWARD, B200, cta_group=group) for group in (1, 2))
DQ_FIRST = replace(PAIR, dq_first=True)


@pytest.mark.parametrize("plan", [SINGLE, PAIR, DQ_FIRST], ids=["single", "dp_first", "dq_first"])
def test_no_order_is_faster_than_the_busiest_unit(plan) -> None:
    assert cycles(plan, B200, 0) >= feeds(B200, Step.of(plan)).bound


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_pair_saves_a_product_of_each_step_with_dp_first(exchange: int) -> None:
    """Then dP of a step runs while its exponentials are taken; with dQ first it waits for them."""
    saved = cycles(DQ_FIRST, B200, exchange) - cycles(PAIR, B200, exchange)
    assert saved >= 2 * 128**3 / B200.tensor_flops


def test_an_exchange_shorter_than_the_exponentials_costs_nothing() -> None:
    assert cycles(PAIR, B200, 1000) == cycles(PAIR, B200, 0)
    assert cycles(PAIR, B200, 4000) > cycles(PAIR, B200, 0)


def test_the_table_has_a_row_for_each_exchange() -> None:
    assert len(list(table())) == 2 + len(EXCHANGES)
