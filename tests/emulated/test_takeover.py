"""The Blackwell forward whose CTAs take over those that have not started, under many interleavings."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.grid import Grid
from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from attn4.plan.plan import Schedule
from emulated.forward_kernel import Case, attend
from needs import COMPILES
from planted.replay import recorded
from planted.waits import without

pytestmark = COMPILES

CASE = Case(64, "causal", 900, 900, heads=2, kv_heads=1, arch="sm_100a", takes_over=True)
TILES = 2 * 4

SCHEDULES = {
    "in turn": RoundRobin,
    "random": lambda: Random(1),
    "late": lambda: Adversarial(late=True),
    "at once": lambda: Adversarial(late=False),
}
SLOW = pytest.mark.slow


def taken_over(case: Case, schedule, sms: int):
    """The result, and which CTAs others took over."""
    cancelled = []
    cancel = Grid.cancel

    def noting(grid):
        found = cancel(grid)
        cancelled.append(found)
        return found

    with patch.object(Grid, "cancel", noting):
        result = attend(case, schedule, sms=sms, hazards=True)
    return result, [first for first in cancelled if first is not None]


@pytest.mark.parametrize(
    ("sms", "name"),
    [
        pytest.param(sms, name, marks=() if (sms, name) == (2, "random") else SLOW)
        for sms in (1, 2, 5, TILES)
        for name in SCHEDULES
    ],
)
def test_tiles_are_worked_on_once_whoever_takes_them(sms, name):
    """What nobody writes stays NaN. The counter's kernel gives the same bits."""
    expected = attend(replace(CASE, takes_over=False), RoundRobin(), sms=2)
    result, cancelled = taken_over(CASE, SCHEDULES[name](), sms)
    assert list(result.grid.findings) == []
    assert result.error < 2.5e-3
    assert torch.equal(result.out.view(torch.int16), expected.out.view(torch.int16))
    assert torch.equal(result.lse, expected.lse)
    assert result.grid.shape.grid == (TILES, 1, 1)
    assert len(set(cancelled)) == len(cancelled) <= TILES - sms
    if sms == 1:
        assert len(cancelled) == TILES - 1


@SLOW
@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_tiles_may_be_taken_over_too(name):
    """Full attention, which is dealt in advance by default, by a scheduling warp instead."""
    options = (("schedule", Schedule("linear", dynamic=True)),)
    case = replace(CASE, mask="full", seqlen_q=600, options=options)
    result, cancelled = taken_over(case, SCHEDULES[name](), 2)
    assert list(result.grid.findings) == []
    assert result.error < 2.5e-3
    assert 0 < len(cancelled) <= 2 * 3 - 2


@SLOW
def test_a_response_that_nobody_waits_for_is_found():
    with recorded() as found:
        attend(CASE, RoundRobin(), sms=1)
    lines = found[-1].launch.ptx.split("\n")
    query = next(n for n, line in enumerate(lines) if "clusterlaunchcontrol.query_cancel" in line)
    wait = max(n for n, line in enumerate(lines[:query]) if "mbarrier.try_wait" in line)
    text = without(found[-1].launch.ptx, wait + 1)
    kinds = [kind for make in SCHEDULES.values() for kind in found[-1].replay(make(), ptx=text, sms=1).kinds]
    assert kinds
