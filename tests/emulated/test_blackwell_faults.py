"""A fault planted in any channel of the Blackwell forward is reported; so is a fence or a wait left out.

The faults are edits of the PTX, found by the names of the plan's channels (`planted.blackwell`); all of them
take about 25 minutes of one core. The kernels as they are, are clean. Faults of arithmetic (`planted.values`)
are shown by cases of the list.
"""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from cases import BY_NAME
from emulated.judged import judge_as_fused
from needs import COMPILES
from planted import blackwell, values

pytestmark = COMPILES

SOME = (
    "row_stats empty: no wait",
    "scores full: arrives early",
    "mma: no fence::after_thread_sync",
)
PARTS = 4


@pytest.mark.parametrize("name", SOME)
def test_a_planted_fault_is_reported(name):
    assert blackwell.reported("causal", blackwell.faults("causal")[name].plant())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", blackwell.SCHEDULES)
@pytest.mark.parametrize("kernel", blackwell.KERNELS)
def test_the_kernel_as_it_is_is_clean(kernel, schedule):
    recording, _, _ = blackwell.kernel(kernel)
    sms = blackwell.KERNELS[kernel].ctas
    assert recording.replay(blackwell.SCHEDULES[schedule](), sms=sms).kinds == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kernel", blackwell.KERNELS)
def test_every_planted_fault_is_reported(kernel, part):
    names = list(blackwell.faults(kernel))[part::PARTS]
    missed = [
        name for name in names if not blackwell.reported(kernel, blackwell.faults(kernel)[name].plant())
    ]
    assert missed == []


@pytest.mark.slow
@pytest.mark.parametrize("name", values.FAULTS)
def test_a_fault_of_arithmetic_is_shown_by_a_case_of_the_list(name, tmp_path):
    fault = values.FAULTS[name]
    case = BY_NAME[fault.case]
    inputs = case.inputs("cpu")
    with fault.plant():
        result = values.attend(case, inputs, tmp_path)
    with pytest.raises(AssertionError):
        judge_as_fused(case, inputs, *result)


@pytest.mark.slow
def test_rescaling_is_not_shown_by_random_values(tmp_path):
    """Why there are hard values: no maximum of random scores grows by a factor over 2**8."""
    case = BY_NAME["full 128 261x261"]
    inputs = case.inputs("cpu")
    with values.FAULTS["the output not rescaled"].plant():
        result = values.attend(case, inputs, tmp_path)
    judge_as_fused(case, inputs, *result)
