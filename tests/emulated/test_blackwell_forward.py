"""The Blackwell forward of attn4 gives on the emulator what the oracle gives, without a hazard."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from attn4.plan.plan import SoftmaxPlan
from cases import CASES
from emulated.forward_kernel import Case, attend
from emulated.judged import attended, is_small
from needs import COMPILES
from problem_case import Case as ProblemCase

pytestmark = COMPILES

BFLOAT16_ERROR = 2.5e-3
"""Relative L2: rounding P and the output to bfloat16 gives 1.9e-3 to 2.4e-3."""
LSE_ERROR = 1e-5
POLYNOMIAL_ERROR = 8.8e-5
"""Largest relative error of the degree-3 polynomial, and so of a sum of such terms."""


CAUSAL = Case(128, "causal", 300, 300, heads=2, kv_heads=1, ctas=1, arch="sm_100a")
FULL = Case(128, "full", 260, 390, ctas=1, arch="sm_100a")
FEW = Case(128, "causal", 100, 600, ctas=1, arch="sm_100a")
"""One query tile, which has two slots of scores."""
WIDE = Case(256, "full", 130, 390, ctas=1, arch="sm_100a")
SCHEDULES = {
    "random": lambda: Random(1),
    "random_together": lambda: Random(2, warps_together=4),
    "late": lambda: Adversarial(late=True),
    "at_once": lambda: Adversarial(late=False),
}


def check(result, lse_error=LSE_ERROR):
    assert result.error < BFLOAT16_ERROR
    torch.testing.assert_close(result.lse, result.expected_lse, atol=lse_error, rtol=0)
    assert list(result.grid.findings) == []


@pytest.mark.parametrize("case", [CAUSAL, FULL], ids=["causal", "full"])
def test_warps_in_turn_give_attention(case):
    check(attend(case, RoundRobin(), hazards=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_interleaving_gives_the_same_bits_without_a_hazard(schedule):
    expected = attend(CAUSAL, RoundRobin())
    result = attend(CAUSAL, SCHEDULES[schedule](), hazards=True)
    check(result)
    assert torch.equal(expected.out.view(torch.int16), result.out.view(torch.int16))
    assert torch.equal(expected.lse, result.lse)


KNOBS = {
    "no threshold": (FULL, {"softmax": SoftmaxPlan(0.0, 8)}, {}),
    "threshold 8, no polynomial": (FULL, {"softmax": SoftmaxPlan(8.0, 0)}, {}),
    "a quarter by polynomial": (FULL, {"softmax": SoftmaxPlan(8.0, 4)}, {}),
    "all by polynomial": (FULL, {"softmax": SoftmaxPlan(8.0, 1)}, {}),
    "probabilities in one piece": (FULL, {"late_keys": 0}, {}),
    "probabilities in halves": (FULL, {"late_keys": 64}, {}),
    "branchless rescale": (FULL, {"softmax": SoftmaxPlan(8.0, 8, branchless_rescale=True)}, {}),
    "branchless rescale, no threshold": (FULL, {"softmax": SoftmaxPlan(0.0, 8, branchless_rescale=True)}, {}),
    "turns in exponentiating": (FULL, {}, {"softmax_turns": True}),
    "turns, all at once": (
        FULL,
        {"softmax": SoftmaxPlan(0.0, 0, branchless_rescale=True), "late_keys": 64},
        {"softmax_turns": True},
    ),
    "one query tile, no threshold": (FEW, {"softmax": SoftmaxPlan(0.0, 8)}, {}),
    "one query tile, probabilities in one piece": (FEW, {"late_keys": 0}, {}),
    "one query tile, one score slot": (FEW, {}, {"score_stages": 1}),
    "wide heads, branchless rescale": (WIDE, {"softmax": SoftmaxPlan(0.0, 8, branchless_rescale=True)}, {}),
    "wide heads, one score slot": (WIDE, {}, {"score_stages": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOBS)
def test_the_extremes_of_a_plan_give_attention(name):
    case, changes, options = KNOBS[name]
    case = dataclasses.replace(case, changes=tuple(changes.items()), options=tuple(options.items()))
    check(attend(case, Adversarial(late=True), hazards=True), LSE_ERROR + POLYNOMIAL_ERROR)


@pytest.mark.parametrize("case", [FEW, pytest.param(WIDE, marks=pytest.mark.slow)], ids=["few", "wide"])
def test_two_score_slots_give_the_bits_of_one(case):
    one = attend(dataclasses.replace(case, options=(("score_stages", 1),)), RoundRobin())
    two = attend(case, Random(4), hazards=True)
    check(two)
    assert torch.equal(one.out.view(torch.int16), two.out.view(torch.int16))
    assert torch.equal(one.lse, two.lse)


CHOSEN = (
    "dim 72 causal",
    "size 193x353 causal 128",
    "full 256 40x300",
    "dim 192,128 causal",
    "used queries and keys",
    "descending causal",
    "outliers full",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_public_function_runs_on_an_emulated_b200(name):
    attended(next(case for case in CASES if case.name == name), "sm_100a")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if is_small(case)], ids=lambda case: case.name)
def test_every_small_case_of_the_list_runs_on_an_emulated_b200(case):
    attended(case, "sm_100a")


@pytest.mark.parametrize(("arch", "by_polynomial"), [("sm_100a", 16), ("sm_103a", 0)])
def test_exponentials_and_products_are_as_many_as_the_plan_says(arch, by_polynomial):
    """By hand, for 260 x 390 of head dimension 128: two CTA tiles of two query tiles, four steps each."""
    steps, tiles, warps = 4, 2 * 2, 4
    gpu = attended(
        ProblemCase(name="", batch=1, seqlen_q=260, seqlen_k=390, heads=1, kv_heads=1, head_dim=128), arch
    )
    (launch,) = gpu.report.to_dict()
    # A row's 128 and one for the maximum that grew; the first step is masked, which the polynomial cannot do.
    a_warp = steps * (128 + 1) - (steps - 1) * by_polynomial
    assert launch["total"]["mufu.ex2"] == tiles * warps * a_warp
    assert launch["total"]["flop"] == tiles * steps * 2 * 2 * 128**3
    assert {"softmax0", "softmax1", "correction", "mma", "store", "load"} <= launch["roles"].keys()
