"""The Blackwell backward of attn4 gives on the emulator what the oracle gives, without a hazard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.report.report import report
from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from attn4.machine import machine
from attn4.plan.choose import unsupported
from cases import CASES
from emulated.backward_kernel import differentiate, judged, sum_bits
from gradient_judge import incoming
from needs import COMPILES
from problem_case import Case

pytestmark = COMPILES

GRADIENTS = 1
"""Of the three launches, the second."""

MOST_PRODUCTS = 1_000_000
"""Query-key pairs of a case that the emulator finishes in seconds."""

PLAIN = Case(name="plain", batch=1, seqlen_q=300, seqlen_k=300, heads=1, kv_heads=1, head_dim=128)
CAUSAL = replace(PLAIN, name="causal", seqlen_q=200, heads=2, causal=True)
PACKED = Case(
    name="packed",
    heads=2,
    kv_heads=1,
    head_dim=64,
    causal=True,
    lens_q=(100, 0, 40, 3),
    lens_k=(130, 5, 0, 90),
    used_q=(50, 0, 40, 3),
    used_k=(130, 5, 0, 70),
    tail=7,
)
SCHEDULES = {
    "random": lambda: Random(1),
    "random_together": lambda: Random(2, warps_together=4),
    "late": lambda: Adversarial(late=True),
    "at_once": lambda: Adversarial(late=False),
}


def without_kernel(case):
    """Whether the case needs something of which no plan exists."""
    problem = replace(case.problem(), direction="backward")
    return unsupported(problem, machine("sm_100a")) != ()


ROUNDED_AWAY = ("one huge key",)
"""Scores of 1e12: their LSE in float32 is rounded by more than 1e4, so no weight can be told from it."""


def is_small(case):
    rows = case.q_shape[-3] * (1 if case.lens_q else case.batch)
    small = rows * case.k_shape[-3] * case.heads <= MOST_PRODUCTS
    return case.launches and small and case.layout in ("contiguous", "bhsd", "sbhd", "fused")


@pytest.mark.parametrize(
    "case", [pytest.param(PLAIN, marks=pytest.mark.slow), CAUSAL, PACKED], ids=lambda case: case.name
)
def test_the_kernels_give_the_gradient_of_attention(case):
    judged(case, Adversarial(late=True))


@pytest.mark.slow
def test_a_key_is_summed_over_the_query_heads_of_its_group():
    case = replace(CAUSAL, name="grouped", seqlen_q=130, seqlen_k=200, heads=4, kv_heads=2, head_dim=64)
    judged(case, RoundRobin())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_interleaving_gives_the_same_dk_and_dv_without_a_hazard(schedule):
    inputs = CAUSAL.inputs("cpu")
    expected = differentiate(CAUSAL, inputs, incoming(CAUSAL, inputs), RoundRobin(), hazards=False)
    found = judged(CAUSAL, SCHEDULES[schedule]())
    for x, y in zip(expected.gradients[1:], found.gradients[1:], strict=True):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))


RESIDENT = Case(
    name="resident", batch=1, seqlen_q=128, seqlen_k=500, heads=1, kv_heads=1, head_dim=32, lse=False
)
"""Four tiles of keys, which add to one block of dQ at the same time."""


@pytest.mark.slow
def test_deterministic_sums_have_the_same_bits_under_every_schedule():
    first, *others = sum_bits(RESIDENT, range(20), deterministic=True)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
def test_other_sums_differ_under_the_same_schedules():
    first, *others = sum_bits(RESIDENT, range(20))
    assert any(not torch.equal(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window": (100, 30)}], ids=["full", "causal", "window"]
)
def test_a_grid_of_which_only_one_cta_is_resident_comes_to_its_end(mask):
    case = replace(RESIDENT, seqlen_q=400, kv_heads=1, heads=2, **mask)
    judged(case, RoundRobin(), deterministic=True, sms=1)


@pytest.mark.slow
def test_a_step_counts_what_feeds_and_speeds_say():
    """Of shared memory 3,328 x 128 bytes, and statistics, which each thread reads for its 64 queries."""
    counts = []
    for steps in (2, 4):
        case = replace(PLAIN, seqlen_q=128 * steps, seqlen_k=128)
        inputs = case.inputs("cpu")
        run = differentiate(case, inputs, incoming(case, inputs), RoundRobin(), hazards=False)
        counts.append(report(run.grids).kernels[GRADIENTS].counts)
    step = {name: (counts[1][name] - counts[0].get(name, 0)) // 2 for name in counts[1]}
    assert step["flop"] == 5 * 2 * 128**3
    assert step["mufu.ex2"] == 128 * 128 // 32
    slices = 128 * 128 * 4
    assert step["bulk reduce bytes"] == slices
    assert step["operand bytes"] == 8 * 128 * 128 * 2
    assert step["shared store bytes"] == 128 * 128 * 2 + slices
    assert step["shared load bytes"] == 256 * 2 * 64 * 4
    moved = step["operand bytes"] + step["shared store bytes"] + step["bulk reduce bytes"]
    assert moved == 3328 * 128


@pytest.mark.slow
def test_an_incoming_gradient_may_be_expanded():
    case = replace(CAUSAL, name="expanded", kv_heads=2)
    judged(case, RoundRobin(), dout=torch.randn(case.head_dim).bfloat16().expand(case.q_shape))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if is_small(case)], ids=lambda case: case.name)
def test_every_small_case_of_the_list_is_differentiated_on_an_emulated_b200(case):
    if without_kernel(case):
        pytest.skip("no plan for this backward pass")
    if case.name in ROUNDED_AWAY:
        pytest.skip("the LSE of such scores does not give their weights")
    judged(case, Random(3))
