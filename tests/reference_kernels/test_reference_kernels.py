"""Kernels that are known to be right on silicon are right on the emulator: those of flash-attn-4, unmodified.

``make test-reference`` installs them and runs this.
"""

import importlib.util

import pytest

from reference_kernels.problem import PROBLEMS
from reference_kernels.table import outcome

ROUNDING = {"bfloat16": 2.5e-3, "float16": 3.2e-4}
"""Relative L2 error of an output: rounding it to bfloat16 alone gives 1.66e-3, to float16 2.1e-4."""

GRADIENT = 1.2
"""A gradient goes through one more rounded matrix."""

LSE = 1e-4

KNOWN = {"sm_100a backward": "leak: a bulk copy"}
"""What is reported of the reference, rightly by the text of PTX: its epilogue stores dK and dV by bulk
copies, for which no one waits before the CTA exits.
"""

UNDER_OTHER_SCHEDULES = (
    "sm_100a forward 128 causal",
    "sm_100a forward 128, a CTA pair",
    "sm_100a forward 256 causal",
    "sm_100a forward 64 split causal grouped",
    "sm_100a backward 64 causal grouped",
    "sm_100a backward 128, a CTA pair",
    "sm_90a forward 128 causal",
    "sm_90a backward 128 deterministic",
)


def _missing():
    try:
        found = importlib.util.find_spec("flash_attn.cute")
    except ModuleNotFoundError:
        found = None
    return None if found else "needs flash-attn-4, which `make test-reference` installs"


pytestmark = [
    pytest.mark.reference,
    pytest.mark.slow,
    pytest.mark.skipif(_missing() is not None, reason=_missing() or ""),
]


def judge(name, found):
    problem = PROBLEMS[name]
    bound = ROUNDING[problem.dtype]
    errors = found["relative_l2"]
    assert set(errors) == ({"out", "dq", "dk", "dv"} if problem.backward else {"out"})
    limits = {key: bound if key == "out" else GRADIENT * bound for key in errors}
    assert {key: value for key, value in errors.items() if not value <= limits[key]} == {}
    assert found["lse_error"] <= LSE


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_kernel_of_the_reference_agrees_with_the_oracle(name):
    judge(name, outcome(name))


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
@pytest.mark.parametrize("name", UNDER_OTHER_SCHEDULES)
def test_a_kernel_of_the_reference_agrees_with_the_oracle_in_any_order_without_hazards(name, schedule):
    found = outcome(name, schedule, seed=1, hazards=True)
    judge(name, found)
    known = next((start for suite, start in KNOWN.items() if name.startswith(suite)), "nothing")
    assert [hazard for hazard in found["hazards"] if not hazard.startswith(known)] == []


@pytest.mark.parametrize("name", [name for name, problem in PROBLEMS.items() if problem.deterministic])
def test_what_the_reference_calls_deterministic_has_the_same_bits_in_any_order(name):
    found = [outcome(name, *order)["digest"] for order in (("round_robin",), ("random", 1), ("random", 2))]
    assert len(set(found)) == 1
