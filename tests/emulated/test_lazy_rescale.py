"""Where the Hopper forward moves a maximum only if it grows by more than a threshold."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.schedule import Adversarial
from cases import CASES, HARD
from emulated.forward_kernel import Case, attend, with_jump
from emulated.judged import attended
from emulated.test_forward import BFLOAT16_ERROR, LSE_ERROR, check, name
from needs import COMPILES

pytestmark = COMPILES

ROW = 77
"""Of the second warpgroup's first warp."""


@pytest.mark.parametrize(
    "case", [Case(64, "full", 100, 150), Case(128, "full", 100, 300), Case(128, "causal", 100, 300)], ids=name
)
def test_a_maximum_that_jumps_late_moves_in_its_row_alone(case):
    # e^96 = 2^138 overflows: a maximum that stayed would leave NaN.
    flat = attend(case, Adversarial(late=True), inputs=with_jump(case, 0, ROW))
    high = attend(case, Adversarial(late=True), hazards=True, inputs=with_jump(case, 96, ROW))
    assert high.error < BFLOAT16_ERROR
    torch.testing.assert_close(high.lse, high.expected_lse, atol=LSE_ERROR, rtol=1e-6)
    others = torch.arange(case.seqlen_q) != ROW
    assert torch.equal(flat.out[:, others].view(torch.int16), high.out[:, others].view(torch.int16))
    assert torch.equal(flat.lse[..., others], high.lse[..., others])
    assert not torch.equal(flat.out[:, ROW], high.out[:, ROW])


@pytest.mark.parametrize(
    "case",
    [Case(64, "causal", 100, 150), Case(128, "causal", 150, 290), Case(128, "window", 150, 290)],
    ids=name,
)
@pytest.mark.parametrize("late", [False, True])
def test_rows_whose_first_block_is_wholly_masked_begin_with_their_first_key(case, late):
    # The last block holds 22 or 34 keys, which most rows do not see.
    check(attend(case, Adversarial(late=late), hazards=True))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.values in HARD and case.head_dim == 128], ids=str
)
def test_values_for_which_a_maximum_is_easily_wrong(case, head_dim):
    attended(replace(case, head_dim=head_dim), "sm_90a", schedule=Adversarial(late=True))
