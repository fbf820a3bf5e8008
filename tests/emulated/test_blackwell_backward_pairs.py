"""The Blackwell backward by pairs of CTAs: as `test_blackwell_backward`, in both orders of its products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.report.report import report
from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from attn4.machine import machine
from attn4.plan import sm100_backward
from cases import CASES
from emulated.backward_kernel import differentiate, judged, pair_plan, sum_bits
from emulated.test_blackwell_backward import (
    GRADIENTS,
    ROUNDED_AWAY,
    SCHEDULES,
    is_small,
    without_kernel,
)
from gradient_judge import incoming
from needs import COMPILES
from problem_case import Case

pytestmark = COMPILES

ORDERS = pytest.mark.parametrize("dq_first", [False, True], ids=["dp_first", "dq_first"])

PLAIN = Case(name="plain", batch=1, seqlen_q=500, seqlen_k=300, heads=1, kv_heads=1, head_dim=128)
"""Four steps of two pairs, of which the second CTA of the second has no keys."""

CAUSAL = replace(PLAIN, name="causal", seqlen_q=200, heads=2, causal=True)
PACKED = Case(
    name="packed",
    heads=2,
    kv_heads=1,
    head_dim=104,
    causal=True,
    lens_q=(100, 0, 40, 3),
    lens_k=(290, 5, 0, 90),
    used_q=(50, 0, 40, 3),
    used_k=(270, 5, 0, 70),
    tail=7,
)


@pytest.mark.parametrize(
    "case", [PLAIN, pytest.param(PACKED, marks=pytest.mark.slow)], ids=lambda case: case.name
)
def test_pairs_give_the_gradient_of_attention(case):
    judged(case, Adversarial(late=True), plan=pair_plan(case))


@pytest.mark.fault("F4")
@pytest.mark.slow
@ORDERS
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_interleaving_gives_the_dk_and_dv_of_single_ctas_without_a_hazard(schedule, dq_first):
    inputs = CAUSAL.inputs("cpu")
    expected = differentiate(CAUSAL, inputs, incoming(CAUSAL, inputs), RoundRobin(), hazards=False)
    found = judged(CAUSAL, SCHEDULES[schedule](), plan=pair_plan(CAUSAL, dq_first=dq_first))
    for x, y in zip(expected.gradients[1:], found.gradients[1:], strict=True):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_pairs_take_smaller_head_dimensions_where_they_are_asked_for(head_dim):
    case = replace(CAUSAL, head_dim=head_dim, seqlen_k=300)
    judged(case, Adversarial(late=True), plan=pair_plan(case))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [24, 40, 88])
def test_pairs_take_packed_sequences_where_the_last_box_of_columns_holds_one(head_dim):
    case = replace(PACKED, head_dim=head_dim)
    judged(case, RoundRobin(), plan=pair_plan(case))


@pytest.mark.slow
def test_a_key_is_summed_over_the_query_heads_of_its_group():
    case = replace(CAUSAL, name="grouped", seqlen_q=130, seqlen_k=520, heads=4, kv_heads=2)
    judged(case, RoundRobin(), plan=pair_plan(case))


RESIDENT = replace(PLAIN, name="resident", seqlen_q=128, seqlen_k=1000, lse=False)
"""Four pairs, which add to one block of dQ at the same time."""


@pytest.mark.fault("F1", "F3")
@pytest.mark.slow
def test_deterministic_sums_have_the_same_bits_under_every_schedule():
    plan = pair_plan(RESIDENT, deterministic=True)
    first, *others = sum_bits(RESIDENT, range(20), plan=plan)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
def test_other_sums_differ_under_the_same_schedules():
    first, *others = sum_bits(RESIDENT, range(20), plan=pair_plan(RESIDENT))
    assert any(not torch.equal(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window": (100, 30)}], ids=["full", "causal", "window"]
)
def test_a_grid_of_which_only_one_pair_is_resident_comes_to_its_end(mask):
    case = replace(RESIDENT, seqlen_q=400, seqlen_k=600, heads=2, **mask)
    judged(case, RoundRobin(), sms=2, plan=pair_plan(case, deterministic=True))


@pytest.mark.slow
def test_sequences_of_different_lengths_take_turns_with_one_pair_resident():
    judged(PACKED, RoundRobin(), sms=2, plan=pair_plan(PACKED, deterministic=True))


@pytest.mark.slow
@ORDERS
def test_a_step_counts_what_feeds_and_speeds_say(dq_first):
    """Of a CTA: 2,688 cycles of shared memory, where bytes from the other CTA cost twice as much."""
    counts = []
    for steps in (2, 4):
        case = replace(PLAIN, seqlen_q=128 * steps, seqlen_k=256)
        inputs = case.inputs("cpu")
        given = incoming(case, inputs)
        run = differentiate(
            case, inputs, given, RoundRobin(), hazards=False, plan=pair_plan(case, dq_first=dq_first)
        )
        counts.append(report(run.grids).kernels[GRADIENTS].counts)
    step = {name: (counts[1][name] - counts[0].get(name, 0)) / 4 for name in counts[1]}
    assert step["flop"] == 5 * 2 * 128**3
    assert step["mufu.ex2"] == 128 * 128 // 32
    slices = 64 * 128 * 4
    assert step["bulk reduce bytes"] == slices
    assert step["operand bytes"] == 6 * 128 * 128 * 2
    assert step["shared store bytes"] == 128 * 128 * 2 + slices
    operands = 2 * 128 * 128 * 2
    statistics = 2 * 128 * 4
    exchanged = 128 * 64 * 2
    assert step["bulk load bytes"] == operands + statistics + exchanged
    moved = step["operand bytes"] + step["shared store bytes"] + step["bulk reduce bytes"]
    where = machine("B200")
    cycles = (moved + exchanged) / where.shared_bytes + exchanged / where.dsmem_bytes
    assert cycles == 2688


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if is_small(case)], ids=lambda case: case.name)
def test_every_small_case_of_the_list_is_differentiated_by_pairs(case):
    if without_kernel(case) or max(case.head_dim, case.head_dim_v or 0) > sm100_backward.MOST_HEAD_DIM:
        pytest.skip("not by pairs")
    if case.name in ROUNDED_AWAY:
        pytest.skip("the LSE of such scores does not give their weights")
    judged(case, Random(3), plan=pair_plan(case))
