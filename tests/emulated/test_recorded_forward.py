"""attn4's Hopper forward gives on the emulator what it gave on an H200.

With products summed as the chip sums them, what is left is the last bit of ex2, 1/x and log2: the
emulator rounds them correctly, the chip errs by up to one unit of the last place. That changes an element
of O by at most one rounding to bfloat16, and few of them.
"""

import pytest
import torch

pytest.importorskip("tvm_ffi")

from attn4.emulator.units.fused import as_on_chip
from attn4.plan import sm90
from needs import COMPILES
from recorded.forward import CASES, inputs
from recorded.replay import DATA, recording

pytestmark = [
    *COMPILES,
    pytest.mark.skipif(not (DATA / "h200_forward.npz.xz").exists(), reason="nothing is recorded"),
]

RELATIVE = 1e-4
"""Relative L2 distance; 5.2e-5 is seen. Rounding O to bfloat16 alone gives 1.6e-3."""
SHARE = 1e-3
"""Of elements that differ at all; 3e-4 is seen."""
LSE = 1e-6
"""Largest distance of the LSE, a unit or two of the last place of float32."""


@pytest.fixture(autouse=True)
def maxima_that_always_move(monkeypatch):
    """As in the kernels that were recorded."""
    monkeypatch.setattr(sm90, "RESCALE_THRESHOLD", 0.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_emulator_gives_what_the_chip_gave(case):
    with as_on_chip():
        out, lse = case.run(inputs(case, "cpu"), backend="emulator")
    bits = torch.from_numpy(recording("h200_forward")[f"{case.name}: out"])
    expected = bits.view(torch.bfloat16).float()
    apart = out.float() - expected
    assert apart.norm() / expected.norm() < RELATIVE
    differ = out.view(torch.int16) != bits
    assert differ.float().mean() < SHARE
    # One rounding to bfloat16: neighbours, of magnitude and sign or through zero.
    assert (apart.abs() <= expected.abs() * 2.0**-7 + 2.0**-14).all()
    expected_lse = torch.from_numpy(recording("h200_forward")[f"{case.name}: lse"])
    assert (lse - expected_lse).abs().max() < LSE


def test_a_sum_in_another_order_is_told_apart():
    """The bounds are near enough to see the order of sums: float64 in their place gives other bits."""
    case = CASES[2]
    expected = torch.from_numpy(recording("h200_forward")[f"{case.name}: out"])
    exact, rounded = [], []
    for on, found in ((True, exact), (False, rounded)):
        with as_on_chip(on):
            out, _ = case.run(inputs(case, "cpu"), backend="emulator")
        found.append((out.view(torch.int16) != expected).sum())
    assert exact[0] < rounded[0]
