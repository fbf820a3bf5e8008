"""Faults of other packages, tried on the reference."""

import pytest

from fault_checks import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_reference_is_free_of(name):
    CHECKS[name]("cpu")
