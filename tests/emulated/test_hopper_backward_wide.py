"""The Hopper backward of head dimensions over 128 gives on the emulator what the oracle gives, without a
hazard.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.report.report import report
from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from attn4.machine import machine
from attn4.plan import sm90_backward_wide
from attn4.plan.channels import validate
from emulated import backward_kernel
from emulated.backward_kernel import differentiate, judged, sum_bits
from emulated.test_blackwell_backward import GRADIENTS, PACKED, SCHEDULES
from gradient_judge import incoming
from needs import COMPILES
from problem_case import Case

pytestmark = COMPILES

HOPPER = {"arch": "sm_90a"}

PLAIN = Case(name="wide", batch=1, seqlen_q=150, seqlen_k=150, heads=1, kv_heads=1, head_dim=256)

CASES = {
    "causal": replace(PLAIN, causal=True, seqlen_q=70, seqlen_k=100),
    "plain": PLAIN,
    "packed": replace(PACKED, head_dim=256),
    "window": replace(PLAIN, window=(60, 20), head_dim=200, dtype="float16"),
    "a group of heads": replace(PLAIN, causal=True, heads=4, kv_heads=2, head_dim=192, seqlen_q=130),
    "unequal head dims": replace(PLAIN, causal=True, head_dim=192, head_dim_v=128, seqlen_q=100),
    "more queries than keys": replace(PLAIN, causal=True, head_dim=136, seqlen_q=193, seqlen_k=64),
    "one key": replace(PLAIN, seqlen_k=1, seqlen_q=65),
    "no gradient of the LSE": replace(PLAIN, seqlen_q=65, seqlen_k=65, lse=False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "causal"] + ["causal"]
)
def test_the_kernels_give_the_gradient_of_attention(name):
    judged(CASES[name], Adversarial(late=True), **HOPPER)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_interleaving_gives_the_same_dk_and_dv_without_a_hazard(schedule):
    case = replace(PLAIN, causal=True, seqlen_q=200, seqlen_k=130)
    inputs = case.inputs("cpu")
    expected = differentiate(case, inputs, incoming(case, inputs), RoundRobin(), hazards=False, **HOPPER)
    found = judged(case, SCHEDULES[schedule](), **HOPPER)
    for x, y in zip(expected.gradients[1:], found.gradients[1:], strict=True):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))


@pytest.mark.slow
def test_a_step_makes_five_products_and_an_exponential_a_score():
    """Of 64 queries and the 64 keys of each of two CTAs."""
    counts = []
    for steps in (2, 4):
        case = replace(PLAIN, seqlen_q=64 * steps, seqlen_k=128)
        inputs = case.inputs("cpu")
        run = differentiate(case, inputs, incoming(case, inputs), Random(1), hazards=False, **HOPPER)
        counts.append(report(run.grids).kernels[GRADIENTS].counts)
    step = {name: (counts[1][name] - counts[0].get(name, 0)) // 2 for name in counts[1]}
    assert step["flop"] == 5 * 2 * 64 * 128 * 256
    assert step["mufu.ex2"] == 64 * 128 // 32


@pytest.mark.slow
def test_single_ctas_give_the_bits_of_clusters(monkeypatch):
    """Of dK and dV under a causal mask, where all take the same steps in the same order."""
    case = replace(PLAIN, causal=True, seqlen_q=100, seqlen_k=120)
    inputs = case.inputs("cpu")
    given = incoming(case, inputs)
    together = differentiate(case, inputs, given, Random(1), **HOPPER)
    problem = replace(case.problem(), direction="backward")
    plan = sm90_backward_wide.backward(problem, machine("sm_90a"), cluster=1)
    validate(plan, machine("sm_90a"))
    monkeypatch.setattr(backward_kernel, "backward_plan", lambda *_: plan)
    alone = differentiate(case, inputs, given, Random(1), **HOPPER)
    assert alone.findings == together.findings == []
    for x, y in zip(alone.gradients[1:], together.gradients[1:], strict=True):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))


ADDING = replace(PLAIN, seqlen_q=100, seqlen_k=260, lse=False)


@pytest.mark.fault("F3")
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [256, 192])
def test_deterministic_sums_have_the_same_bits_under_every_schedule(head_dim):
    """With 192 columns those in the middle are added by either CTA, in turn by query block."""
    case = replace(ADDING, head_dim=head_dim)
    first, *others = sum_bits(case, range(4), deterministic=True, **HOPPER)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
def test_other_sums_differ_under_the_same_schedules():
    first, *others = sum_bits(ADDING, range(4), **HOPPER)
    assert any(not torch.equal(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=["full", "causal"])
def test_a_grid_of_which_only_one_cta_is_resident_comes_to_its_end(mask):
    case = replace(ADDING, seqlen_q=150, seqlen_k=200, **mask)
    judged(case, RoundRobin(), deterministic=True, sms=1, **HOPPER)
