"""Exchange between lanes, one warp and several at once, against the manual's pseudocode lane by lane."""

import numpy as np
import pytest

from attn4.emulator.faults import DivergedWarp
from attn4.emulator.isa.registry import UnsupportedInstruction
from isa_lines import bits, bound, execute, u32

FULL = np.full(64, 2**32 - 1, np.uint32)
VALUES = np.random.default_rng(1).integers(0, 2**32, 64, dtype=np.uint32)


def shuffled(mode, values, offset, clamp):
    """Results and predicates of one warp by the pseudocode of shfl.sync."""
    results, inside = [], []
    for lane in range(32):
        b, c = offset & 31, clamp
        segment, bound_ = c >> 8 & 31, c & 31
        highest = (lane & segment) | (bound_ & ~segment & 31)
        lowest = lane & segment
        j, p = {
            "up": (lane - b, lane - b >= highest),
            "down": (lane + b, lane + b <= highest),
            "bfly": (lane ^ b, lane ^ b <= highest),
            "idx": (lowest | (b & ~segment & 31), lowest | (b & ~segment & 31) <= highest),
        }[mode]
        if mode == "bfly":
            p = (lane ^ b) <= highest
        if mode == "idx":
            p = j <= highest
        results.append(int(values[j if p else lane]))
        inside.append(bool(p))
    return results, inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8, 4])
@pytest.mark.parametrize("offset", [0, 1, 2, 5, 16, 31])
def test_shfl_in_all_modes_and_segments(mode, width, offset):
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    expected = [shuffled(mode, VALUES[start : start + 32], offset, clamp) for start in (0, 32)]
    results, inside = (expected[0][n] + expected[1][n] for n in range(2))
    got, p = execute(f"shfl.sync.{mode}.b32 %r0|%p0, %r1, {offset}, {clamp}, -1", VALUES)
    assert got.tolist() == results
    assert p.tolist() == inside
    at_run_time = execute(
        f"shfl.sync.{mode}.b32 %r0, %r1, %r2, %r3, %r4",
        VALUES,
        np.full(64, offset, np.uint32),
        np.full(64, clamp, np.uint32),
        FULL,
    )
    assert at_run_time.tolist() == results


def test_shfl_takes_an_offset_of_its_own_in_each_lane():
    offsets = np.random.default_rng(2).integers(0, 32, 64).astype(np.uint32)
    got = execute("shfl.sync.idx.b32 %r0, %r1, %r2, 31, -1", VALUES, offsets)
    rows = VALUES.reshape(2, 32)
    assert got.tolist() == [int(rows[n // 32][offsets[n]]) for n in range(64)]


def test_shfl_from_a_lane_that_is_not_there_is_undefined():
    mask = np.arange(64) % 32 < 16
    alive = mask.copy()
    got = execute(
        "shfl.sync.idx.b32 %r0, %r1, %r2, 31, -1", VALUES, np.full(64, 20, np.uint32), mask=mask, alive=alive
    )
    assert (got[mask] == 0xCBCBCBCB).all()
    got = execute("shfl.sync.idx.b32 %r0, %r1, 3, 31, -1", VALUES, mask=mask, alive=alive)
    assert (got[:16] == VALUES[3]).all()


def test_a_member_that_is_elsewhere_is_an_error_and_one_that_has_exited_is_not():
    mask = np.arange(64) != 5
    with pytest.raises(DivergedWarp, match=r"\[5\]"):
        execute("vote.sync.ballot.b32 %r0, %p0, -1", mask, mask=mask)
    got = execute("vote.sync.ballot.b32 %r0, %p0, -1", mask, mask=mask, alive=mask)
    assert got[0] == 2**32 - 1 - 32
    with pytest.raises(DivergedWarp, match="lane 1 "):
        execute("vote.sync.ballot.b32 %r0, %p0, 1", mask, mask=np.arange(64) < 2)


def test_vote():
    p = np.arange(64) >= 31
    assert execute("vote.sync.ballot.b32 %r0, %p0, -1", p).tolist() == [2**31] * 32 + [2**32 - 1] * 32
    assert execute("vote.sync.any.pred %p1, %p0, -1", p).all()
    assert execute("vote.sync.all.pred %p1, %p0, -1", p).tolist() == [False] * 32 + [True] * 32
    assert execute("vote.sync.uni.pred %p1, %p0, -1", p).tolist() == [False] * 32 + [True] * 32
    assert execute("vote.sync.uni.pred %p1, %p0, -1", np.zeros(64, bool)).all()
    active = np.arange(64) % 32 >= 30
    members = np.full(64, 3 << 30, np.uint32)
    got = execute("vote.sync.ballot.b32 %r0, %p0, %r1", p, members, mask=active)
    assert got[active].tolist() == [2**31, 2**31, 3 << 30, 3 << 30]
    assert execute("vote.sync.all.pred %p1, %p0, %r1", p, members, mask=active)[active].tolist() == [
        0,
        0,
        1,
        1,
    ]


@pytest.mark.parametrize("width", [32, 64])
def test_match(width):
    register = {32: "%r", 64: "%d"}[width]
    values = (np.arange(64) % 3).astype(f"u{width // 8}")
    got = execute(f"match.any.sync.b{width} %r0, {register}1, -1", values)
    for lane in range(64):
        start = lane // 32 * 32
        assert got[lane] == sum(1 << n for n in range(32) if values[start + n] == values[lane])
    values[32:] = 7
    got, p = execute(f"match.all.sync.b{width} %r0|%p0, {register}1, -1", values)
    assert got.tolist() == [0] * 32 + [2**32 - 1] * 32
    assert p.tolist() == [False] * 32 + [True] * 32


def test_redux_reduces_each_group_of_members():
    rows = VALUES.reshape(2, 32)
    signed = rows.view(np.int32)
    cases = {
        "add.u32": rows.sum(1, dtype=np.uint32),
        "min.u32": rows.min(1),
        "max.u32": rows.max(1),
        "min.s32": signed.min(1).view(np.uint32),
        "max.s32": signed.max(1).view(np.uint32),
        "and.b32": np.bitwise_and.reduce(rows, 1),
        "or.b32": np.bitwise_or.reduce(rows, 1),
        "xor.b32": np.bitwise_xor.reduce(rows, 1),
    }
    for name, expected in cases.items():
        got = execute(f"redux.sync.{name} %r0, %r1, -1", VALUES)
        np.testing.assert_array_equal(got, np.repeat(expected, 32))
    members = np.where(np.arange(64) % 2, np.uint32(0xAAAAAAAA), np.uint32(0x55555555))
    got = execute("redux.sync.max.u32 %r0, %r1, %r2", VALUES, members)
    np.testing.assert_array_equal(
        got.reshape(2, 16, 2), np.repeat(rows.reshape(2, 16, 2).max(1)[:, None], 16, 1)
    )


def test_redux_of_floats_orders_zeros_and_treats_nan_as_asked():
    a = np.zeros(32, np.float32)
    a[:4] = [-0.0, 3.0, -7.0, np.nan]
    line = "redux.sync.{}.f32 %f0, %f1, -1"
    assert execute(line.format("max"), bits(a))[0] == bits(3.0)
    assert execute(line.format("min"), bits(a))[0] == bits(-7.0)
    assert execute(line.format("max.abs"), bits(a))[0] == bits(7.0)
    assert execute(line.format("max.NaN"), bits(a))[0] == 0x7FFFFFFF
    zeros = bits(np.where(np.arange(32) == 9, np.float32(-0.0), np.float32(0.0)))
    assert execute(line.format("min"), zeros)[0] == 0x80000000
    assert execute(line.format("max"), zeros ^ np.uint32(0x80000000))[0] == 0
    assert execute(line.format("min"), np.full(32, 0x7FC00000, np.uint32))[0] == 0x7FFFFFFF


def test_elect_chooses_the_lowest_member():
    leader, p = execute("elect.sync %r0|%p0, %r1", FULL)
    assert leader.tolist() == [0] * 64
    assert np.flatnonzero(p).tolist() == [0, 32]
    active = np.arange(64) % 32 >= 12
    _, p = execute("elect.sync _|%p0, %r1", np.full(64, 2**32 - 2**12, np.uint32), mask=active)
    assert np.flatnonzero(p).tolist() == [12, 44]


def test_activemask_is_the_mask_of_the_warp():
    mask = np.arange(64) % 5 == 0
    operation = bound("activemask.b32 %r0")
    got = operation.function(None, mask)
    for start in (0, 32):
        assert got[start] == sum(1 << n for n in range(32) if mask[start + n])


@pytest.mark.parametrize(
    "line",
    [
        "elect.sync %r0, -1",
        "redux.sync.add.f32 %f0, %f1, -1",
        "vote.sync.ballot.pred %p0, %p1, -1",
        "match.any.sync.b32 %r0|%p0, %r1, -1",
        "shfl.idx.b32 %r0, %r1, 0, 31, -1",
        "shfl.sync.idx.b32 %r0, %r1, 0, 31",
    ],
)
def test_forms_that_do_not_exist_are_errors(line):
    with pytest.raises(UnsupportedInstruction):
        bound(line)


def test_votes_on_constants_are_possible():
    assert execute("vote.sync.ballot.b32 %r0, 1, %r1", u32(*[2**32 - 1] * 32)).tolist() == [2**32 - 1] * 32
