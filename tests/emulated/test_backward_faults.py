"""A fault planted in any channel of the backward kernels is reported; so is a fence or a wait left out, and
one in the turns of deterministic sums is reported or shown by the bits.

As `test_blackwell_faults`, of the kernels that compute gradients.
"""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from needs import COMPILES
from planted import backward

pytestmark = [
    pytest.mark.slow,
    *COMPILES,
]

PARTS = 2
DETERMINISTIC = [name for name, kernel in backward.KERNELS.items() if kernel.deterministic]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", backward.KERNELS)
def test_every_planted_fault_is_found(name, part):
    plant = backward.faults(name)
    assert [
        fault for fault in list(plant)[part::PARTS] if not backward.found_by(name, plant[fault].plant())
    ] == []


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_deterministic_kernel_as_it_is_writes_the_same_bits_under_all_of_these_schedules(name):
    assert backward.differing(name) is None
