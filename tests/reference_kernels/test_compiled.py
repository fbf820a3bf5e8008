"""A step of attn4's softmax issues no more instructions than the reference's, compiled in the same run."""

import importlib.util

import pytest

from reference_kernels.compiled import in_a_process, loops


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
