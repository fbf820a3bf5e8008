"""Faults of other packages, tried on the kernels."""

import pytest

from fault_checks import CHECKS
from poison import poisoned_memory


@pytest.mark.parametrize("name", CHECKS)
def test_kernels_are_free_of(name):
    with poisoned_memory():
        CHECKS[name]("cuda")
