"""The Hopper forward of attn4, as compiled, gives on the emulator what the oracle gives."""

import dataclasses

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.report.report import report
from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from emulated.forward_kernel import Case, attend
from needs import COMPILES

pytestmark = COMPILES

BFLOAT16_ERROR = 2.5e-3
"""Relative L2: rounding P and the output to bfloat16 gives 1.9e-3 to 2.2e-3."""
LSE_ERROR = 1e-5

CASES = [
    Case(64, "full", 128, 128),
    Case(64, "causal", 300, 300),
    Case(128, "full", 200, 200),
    Case(128, "causal", 257, 257),
    Case(128, "causal", 150, 290, heads=4, kv_heads=2),
    Case(64, "causal", 190, 210, lens_q=(1, 190, 70), lens_k=(65, 210, 70)),
    Case(128, "full", 200, 130, heads=2, lens_q=(200, 0, 64), lens_k=(130, 5, 128)),
    Case(256, "window", 130, 200),
]


def name(case):
    varlen = "varlen" if case.packed else f"{case.seqlen_q}x{case.seqlen_k}"
    return f"d{case.head_dim}_{case.mask}_{varlen}_h{case.heads}"


def check(result):
    assert result.error < BFLOAT16_ERROR
    torch.testing.assert_close(result.lse, result.expected_lse, atol=LSE_ERROR, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_warps_in_turn_give_attention(case):
    check(attend(case, RoundRobin()))


@pytest.mark.parametrize("case", CASES[1:6:2], ids=name)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda: Random(1),
        lambda: Random(2, warps_together=4),
        lambda: Adversarial(late=True),
        lambda: Adversarial(late=False),
        lambda: RoundRobin(quantum=1, warps_together=1),
    ],
    ids=["random", "random_together", "late", "at_once", "short_turns"],
)
def test_every_interleaving_gives_the_same_bits(case, schedule):
    expected, result = attend(case, RoundRobin()), attend(case, schedule())
    assert torch.equal(expected.out.view(torch.int16), result.out.view(torch.int16))
    assert torch.equal(expected.lse, result.lse)


def test_the_number_of_resident_blocks_does_not_matter():
    case = dataclasses.replace(CASES[4], ctas=8)
    one, many = attend(case, RoundRobin(), sms=1), attend(case, RoundRobin(), sms=8)
    assert torch.equal(one.out.view(torch.int16), many.out.view(torch.int16))


@pytest.mark.parametrize(
    "case",
    [
        Case(64, "full", 520, 70, ctas=1),
        Case(64, "causal", 520, 150, ctas=1),
        Case(128, "full", 300, 140, heads=2, ctas=1),
        Case(128, "causal", 300, 150, heads=2, ctas=1),
        Case(128, "window", 300, 300, ctas=1),
    ],
    ids=name,
)
@pytest.mark.parametrize("late", [False, True])
def test_a_tile_begins_while_the_one_before_it_ends(case, late):
    # One CTA takes all tiles; under the causal mask the first 150 queries see no key, so one tile has none.
    check(attend(case, Adversarial(late=late), hazards=True))


def test_a_warpgroup_passes_over_key_blocks_that_none_of_its_rows_sees():
    # 128 queries are 64 rows of two warpgroups, 128 keys two blocks of 80: the first sees one of them.
    result = attend(Case(256, "causal", 128, 128), Adversarial(late=True), hazards=True)
    check(result)
    roles = report([result.grid], {"first": range(4, 8), "second": range(8, 12)}).kernels[0].roles
    assert roles["second"]["products"] == 2 * roles["first"]["products"]
