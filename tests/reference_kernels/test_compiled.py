"""A step of attn4's softmax issues no more instructions than the reference's, compiled in the same run."""

import importlib.util

import pytest

from reference_kernels.compiled import in_a_process
from reference_kernels.compiled_pages import backward_cells, loops


def _missing():
    try:
        found = all(importlib.util.find_spec(name) for name in ("flash_attn.cute", "cutlass"))
    except ModuleNotFoundError:
        found = False
    return None if found else "needs flash-attn-4, which `make test-reference` installs"


pytestmark = [
    pytest.mark.reference,
    pytest.mark.slow,
    pytest.mark.skipif(_missing() is not None, reason=_missing() or ""),
]


@pytest.mark.parametrize("name", ["64 causal", "128 causal", "(192, 128) causal", "256 causal"])
def test_a_step_of_softmax_issues_no_more_than_the_references(name):
    (ours,), (theirs,) = (in_a_process(kernel, name) for kernel in ("attn4", "flash-attn-4"))
    own, reference = loops(ours, "softmax"), loops(theirs, "softmax")
    assert own[0]["slots"] <= reference[0]["slots"]
    assert own[-1]["slots"] <= reference[-1]["slots"]


@pytest.mark.parametrize("name", ["64 full", "64 causal", "128 full", "128 causal"])
def test_a_step_of_gradients_issues_no_more_than_the_references(name):
    """Of all its warps: eight that compute, four that reduce, one that multiplies and one that loads."""
    (ours,), (theirs,) = (in_a_process(kernel, name, backward=True) for kernel in ("attn4", "flash-attn-4"))
    own, reference = backward_cells(ours), backward_cells(theirs)
    assert own[0] <= reference[0]
    assert own[1] <= reference[1]
    slots = [8 * cells[1] + 4 * cells[2] + cells[3] + cells[4] for cells in (own, reference)]
    assert slots[0] <= slots[1]
    assert sum(role["stack"] for role in ours["roles"]) == 0
