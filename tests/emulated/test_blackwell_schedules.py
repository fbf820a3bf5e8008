"""Every small case of the list through the Blackwell forward under every schedule, hazards looked for.

Cases of one kernel are one test. Schedules differ in what a head sees, not in which: of each case one
sequence of one K/V head is run. About 25 minutes of one core.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from attn4.machine import machine
from attn4.plan.choose import choose
from cases import CASES
from emulated.judged import attended, is_small
from needs import COMPILES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    *COMPILES,
]

SCHEDULES = {
    "in turn": RoundRobin,
    "random 1": lambda: Random(1),
    "random 2": lambda: Random(2),
    "random, warpgroups together": lambda: Random(3, warps_together=4),
    "late": lambda: Adversarial(1, late=True),
    "at once": lambda: Adversarial(1, late=False),
}


def one_head(case):
    """The case with one K/V head and one sequence, unless more than one is what it is about."""
    if case.layout != "contiguous":
        return case
    batch = case.batch if case.varlen else 1
    return replace(case, heads=case.heads // case.kv_heads, kv_heads=1, batch=batch)


def by_plan():
    """The small cases by the kernel that they need, named after the first of each."""
    groups = defaultdict(dict)
    for case in filter(is_small, CASES):
        small = one_head(case)
        groups[choose(small.problem(), machine("sm_100a"))].setdefault(replace(small, name=""), small)
    return {next(iter(cases.values())).name: tuple(cases.values()) for cases in groups.values()}


GROUPS = by_plan()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_small_case_of_a_kernel_under_every_schedule(group, schedule):
    for case in GROUPS[group]:
        try:
            attended(case, schedule=SCHEDULES[schedule]())
        except Exception as error:
            error.add_note(f"in the case {case.name!r}")
            raise
