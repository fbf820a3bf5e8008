"""The Hopper backward of attn4 gives on the emulator what the oracle gives, without a hazard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.report.report import report
from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from emulated.backward_kernel import differentiate, judged, sum_bits
from emulated.test_blackwell_backward import CAUSAL, GRADIENTS, PACKED, PLAIN, RESIDENT, SCHEDULES
from gradient_judge import gradient_oracle, incoming
from needs import COMPILES

pytestmark = COMPILES


HOPPER = {"arch": "sm_90a"}

CASES = {
    "plain": PLAIN,
    "causal": replace(CAUSAL, seqlen_q=130, seqlen_k=200),
    "packed": PACKED,
    "window": replace(CAUSAL, causal=False, window=(60, 20), head_dim=72, dtype="float16"),
    "a group of heads": replace(CAUSAL, heads=4, kv_heads=2, head_dim=64, seqlen_q=100),
    "more queries than keys": replace(CAUSAL, head_dim=96, seqlen_q=193, seqlen_k=64),
    "one key": replace(PLAIN, head_dim=32, seqlen_k=1, seqlen_q=65),
    "no gradient of the LSE": replace(PLAIN, head_dim=64, seqlen_q=129, seqlen_k=129, lse=False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "causal"] + ["causal"]
)
def test_the_kernels_give_the_gradient_of_attention(name):
    judged(CASES[name], Adversarial(late=True), **HOPPER)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_interleaving_gives_the_same_dk_and_dv_without_a_hazard(schedule):
    case = CASES["causal"]
    inputs = case.inputs("cpu")
    expected = differentiate(case, inputs, incoming(case, inputs), RoundRobin(), hazards=False, **HOPPER)
    found = judged(case, SCHEDULES[schedule](), **HOPPER)
    for x, y in zip(expected.gradients[1:], found.gradients[1:], strict=True):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))


@pytest.mark.slow
def test_half_precision_has_room_for_gradients_of_probabilities_past_its_range():
    """dP is, dS is not: so it may not be rounded before P makes it small."""
    case = replace(PLAIN, head_dim=64, dtype="float16", seqlen_q=100, seqlen_k=300, lse=False)
    inputs = case.inputs("cpu")
    given = incoming(case, inputs)
    given = replace(given, dout=8000 * given.dout.sign())
    range_of_half = torch.finfo(torch.float16).max
    assert (
        torch.einsum("bqhd,bkhd->bhqk", given.dout.float(), inputs.v.float()).abs().max() > 2 * range_of_half
    )
    run = differentiate(case, inputs, given, RoundRobin(), hazards=False, **HOPPER)
    for found, expected in zip(run.gradients, gradient_oracle(case, inputs, given), strict=True):
        assert (found.float() - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.slow
def test_a_step_makes_five_products_and_an_exponential_a_score():
    """Of 64 queries and 128 keys; the first step has one more dQ, of zeros."""
    counts = []
    for steps in (4, 8):
        case = replace(PLAIN, seqlen_q=64 * steps, seqlen_k=128)
        inputs = case.inputs("cpu")
        run = differentiate(case, inputs, incoming(case, inputs), Random(1), hazards=False, **HOPPER)
        counts.append(report(run.grids).kernels[GRADIENTS].counts)
    step = {name: (counts[1][name] - counts[0].get(name, 0)) // 4 for name in counts[1]}
    product = 2 * 64 * 128 * 128
    assert step["flop"] == 5 * product
    assert counts[0]["flop"] == (4 * 5 + 1) * product
    assert step["mufu.ex2"] == 64 * 128 // 32


ADDING = replace(RESIDENT, seqlen_q=100)
TURNING = replace(RESIDENT, seqlen_q=300, seqlen_k=300, heads=2, kv_heads=2, head_dim=64, causal=True)
"""The second of two heads is taken in the other order. Three tiles of keys each."""


@pytest.mark.slow
@pytest.mark.parametrize("case", [ADDING, TURNING], ids=["full", "causal"])
def test_deterministic_sums_have_the_same_bits_under_every_schedule(case):
    first, *others = sum_bits(case, range(8), deterministic=True, **HOPPER)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
def test_other_sums_differ_under_the_same_schedules():
    first, *others = sum_bits(ADDING, range(8), **HOPPER)
    assert any(not torch.equal(first, other) for other in others)


FEW = {
    "full": replace(RESIDENT, seqlen_q=200, seqlen_k=300, heads=2),
    "causal": TURNING,
    "a group of heads": replace(TURNING, heads=4, head_dim=128),
    "packed": replace(
        PACKED,
        heads=4,
        kv_heads=2,
        lens_q=(100, 0, 40, 300),
        lens_k=(130, 5, 0, 290),
        used_q=(50, 0, 40, 300),
        used_k=(130, 5, 0, 280),
    ),
    "window": replace(TURNING, causal=False, window=(60, 20)),
}


@pytest.mark.slow
@pytest.mark.parametrize("sms", [1, 2, 3])
@pytest.mark.parametrize("name", FEW)
def test_a_grid_of_which_few_ctas_are_resident_comes_to_its_end(name, sms):
    judged(FEW[name], RoundRobin(), deterministic=True, sms=sms, **HOPPER)
