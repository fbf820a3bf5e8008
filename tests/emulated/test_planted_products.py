"""A wait, a commit or a fence of products dropped from attn4's Hopper kernel is told by the registers."""

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.grid import Limits
from attn4.emulator.schedule import RoundRobin
from emulated.test_planted_faults import kernel
from needs import COMPILES

pytestmark = COMPILES


def kinds_without(word):
    """For each instruction called ``word``: what is reported when it is dropped."""
    recording, _, _ = kernel()
    lines = recording.launch.ptx.split("\n")
    found = []
    for number, line in enumerate(lines):
        if word in line:
            ptx = "\n".join([*lines[:number], "", *lines[number + 1 :]])
            found.append(recording.replay(RoundRobin(), ptx=ptx, sms=1, limits=Limits(seconds=60)).kinds)
    assert found
    return found


@pytest.mark.parametrize(
    "word", ["wgmma.wait_group", pytest.param("wgmma.commit_group", marks=pytest.mark.slow)]
)
def test_a_product_that_is_not_waited_for_is_reported(word):
    assert all("pending register" in kinds for kinds in kinds_without(word))


@pytest.mark.slow
def test_a_fence_dropped_is_reported_unless_nothing_touched_the_registers_since_the_one_before():
    found = kinds_without("wgmma.fence")
    assert [kinds for kinds in found if kinds not in (["unfenced"], [])] == []
    # Products are issued in pairs at two places: in a step, and between two tiles.
    assert sum(kinds == [] for kinds in found) <= 2
