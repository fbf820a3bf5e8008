"""A fault planted in any channel of the Blackwell backward is reported; so is a fence or a wait left out.

As `test_blackwell_faults`, of the kernel that computes gradients.
"""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.artifact.key import toolchain
from planted import blackwell_backward
from planted.blackwell import first_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolchain() is None, reason="CuTe DSL is not installed"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]

PARTS = 2


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_planted_fault_is_reported(part):
    recording, _, _ = blackwell_backward.kernel()
    names = list(blackwell_backward.faults())[part::PARTS]
    plant = blackwell_backward.faults()
    assert [name for name in names if not first_report(recording, plant[name].plant())] == []
