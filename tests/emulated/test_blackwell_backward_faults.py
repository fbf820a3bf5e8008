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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolchain() is None, reason="CuTe DSL is not installed"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]

PARTS = 2


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kernel", blackwell_backward.KERNELS)
def test_every_planted_fault_is_reported(kernel, part):
    plant = blackwell_backward.faults(kernel)
    names = list(plant)[part::PARTS]
    assert [name for name in names if not blackwell_backward.reported(kernel, plant[name].plant())] == []
