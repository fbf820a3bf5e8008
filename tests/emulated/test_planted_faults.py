"""A fault planted in any channel of attn4's Hopper kernel is reported, and the kernel as it is, is clean.

The faults are edits of its PTX, found by the names of the plan's channels: a wait dropped, an arrive count
off by one, a buffer given back before it has been read.
"""

from functools import cache

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.grid import Limits
from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from emulated.forward_kernel import Case, artifact, attend, with_jump
from needs import COMPILES
from planted import channels
from planted.replay import recorded
from planted.waits import executed

pytestmark = COMPILES

CASE = Case(128, "full", 256, 250, ctas=1)
"""Two query tiles of one CTA, and as many key tiles as their rings have slots: with more of them a query
tile could not be overtaken, whether or not anybody waits for its slot.
"""

ORDERS = {
    "copies late": lambda: Adversarial(1, late=True),
    "copies early": lambda: Adversarial(1, late=False),
    "random": lambda: Random(1),
    "in turn": RoundRobin,
}
RINGS = ("tile", "query", "key", "value")


@cache
def kernel():
    """The launch, the mbarrier operations that it executes, and its rings by name.

    The maximum of one row jumps, so that its warp executes what only such a warp does.
    """
    with recorded() as found:
        attend(CASE, RoundRobin(), sms=1, inputs=with_jump(CASE, 96, row=77))
    rings = channels.rings(artifact(CASE).description.plan)
    assert set(rings) == set(RINGS)
    return found[-1], executed(found[-1], sms=1), rings


def reported(ptx):
    """What is reported, and under which order first; nothing under any is an error."""
    recording, _, _ = kernel()
    for name, order in ORDERS.items():
        done = recording.replay(order(), ptx=ptx, sms=1, limits=Limits(seconds=60, idle_instructions=100_000))
        if done.kinds:
            return name, done.kinds
    raise AssertionError("nothing was reported")


@pytest.mark.parametrize("order", ORDERS)
def test_the_kernel_as_it_is_is_clean(order):
    recording, _, _ = kernel()
    done = recording.replay(ORDERS[order](), sms=1)
    assert done.kinds == []


@pytest.mark.parametrize("side", ["full", "empty"])
@pytest.mark.parametrize("name", RINGS)
def test_a_wait_dropped_is_reported(name, side):
    recording, sites, rings = kernel()
    print(reported(channels.wait_dropped(recording.launch.ptx, sites, rings[name], side)))


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("side", ["full", "empty"])
@pytest.mark.parametrize(
    "name", ["key", *(pytest.param(name, marks=pytest.mark.slow) for name in RINGS if name != "key")]
)
def test_an_arrive_count_off_by_one_is_reported(name, side, by):
    recording, sites, rings = kernel()
    print(reported(channels.count_changed(recording.launch.ptx, sites, rings[name], side, by)))


@pytest.mark.parametrize("name", RINGS)
def test_a_buffer_given_back_before_it_is_read_is_reported(name):
    recording, sites, rings = kernel()
    print(reported(channels.given_back_early(recording.launch.ptx, sites, rings[name])))


def test_a_turn_taken_unasked_is_reported():
    recording, _, _ = kernel()
    print(reported(channels.turn_taken_unasked(recording.launch.ptx)))


@pytest.mark.parametrize("by", [32, -32])
def test_a_turn_of_the_wrong_number_of_threads_is_reported(by):
    recording, _, _ = kernel()
    print(reported(channels.turn_count_changed(recording.launch.ptx, by)))
