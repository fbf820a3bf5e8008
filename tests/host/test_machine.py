"""Machines: names, sources and derived rates."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from attn4.machine import MACHINES, Machine, machine


@pytest.mark.parametrize(
    ("name", "arch", "chip"),
    [
        ("sm_90a", "sm_90a", "H200"),
        ("H100", "sm_90a", "H100"),
        ("h200", "sm_90a", "H200"),
        ("sm_100a", "sm_100a", "B200"),
        ("B200", "sm_100a", "B200"),
        ("sm_103a", "sm_103a", "B300"),
        ("b300", "sm_103a", "B300"),
    ],
)
def test_a_machine_is_found_by_architecture_and_by_product(name: str, arch: str, chip: str) -> None:
    found = machine(name)
    assert (found.name, found.chip) == (arch, chip)


def test_an_unknown_machine_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'sm_80'.*sm_90a, sm_100a, sm_103a"):
        machine("sm_80")


@pytest.mark.parametrize("where", MACHINES, ids=lambda m: m.name)
def test_every_number_of_a_machine_has_a_source(where: Machine) -> None:
    numbers = {field.name for field in fields(Machine)} - {"name", "chip", "sources"}
    assert dict(where.sources).keys() == numbers
    assert all(dict(where.sources).values())


def test_peak_rates_are_those_of_the_data_sheets_at_their_clocks() -> None:
    # 989 TFLOP/s at 1.83 GHz for the H100, 2250 at 1.86 GHz for the B200.
    h100, b200 = machine("H100"), machine("B200")
    assert h100.peak_tflops * 1.83 / h100.clock_ghz == pytest.approx(989, rel=0.01)
    assert b200.peak_tflops * 1.86 / b200.clock_ghz == pytest.approx(2250, rel=0.01)


def test_blackwell_changes_the_tensor_core_and_not_the_other_rates() -> None:
    hopper, blackwell = machine("sm_90a"), machine("sm_100a")
    assert blackwell.tensor_flops == 2 * hopper.tensor_flops
    assert (blackwell.exponentials, blackwell.shared_bytes) == (hopper.exponentials, hopper.shared_bytes)
    assert (hopper.cta_groups, blackwell.cta_groups) == ((1,), (1, 2))


def test_a_machine_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        machine("sm_90a").sms = 1  # type: ignore[misc]
