"""Conversions against rational numbers and numpy."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from attn4.emulator.isa.registry import UnsupportedInstruction
from isa_lines import bits, bound, execute, hard_singles, is_special, rounded, u32, value_of

REGISTERS = {8: "%h", 16: "%h", 32: "%r", 64: "%d"}
INTEGERS = [f"{sign}{width}" for sign in "su" for width in (8, 16, 32, 64)]
REALS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
MODES = ["rn", "rz", "rm", "rp"]


def integer(pattern, kind):
    width = int(kind[1:])
    pattern = int(pattern) & (1 << width) - 1
    return pattern - (1 << width) if kind[0] == "s" and pattern >> width - 1 else pattern


def limits(kind):
    width = int(kind[1:])
    return (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "s" else (0, (1 << width) - 1)


def patterns(kind, count, seed):
    width = int(kind[1:])
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**64, count, dtype=np.uint64) >> rng.integers(0, width, count).astype(np.uint64)
    low, high = (x & 2**64 - 1 for x in limits(kind))
    values[:6] = [0, 1, low, high, high - 1, 2**64 - 1]
    return values.astype(f"u{max(width, 16) // 8}")


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", INTEGERS)
def test_integers_are_extended_cut_or_clamped(source, target):
    a = patterns(source, 64, 1)
    registers = f"{REGISTERS[int(target[1:])]}0, {REGISTERS[int(source[1:])]}1"
    got, clamped = (
        execute(f"cvt.{target}.{source} {registers}", a),
        execute(f"cvt.sat.{target}.{source} {registers}", a),
    )
    mask = (1 << max(int(target[1:]), 16)) - 1
    low, high = limits(target)
    for x, y, z in zip(a.tolist(), got.tolist(), clamped.tolist(), strict=True):
        assert y == integer(integer(x, source), target) & mask
        assert z == max(low, min(high, integer(x, source))) & mask


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", REALS)
@pytest.mark.parametrize("mode", MODES)
def test_integers_become_floats_with_one_rounding(source, target, mode):
    a = patterns(source, 128, 2)
    got = execute(
        f"cvt.{mode}.{target}.{source} {REGISTERS[REALS[target]]}0, {REGISTERS[int(source[1:])]}1", a
    )
    expected = [rounded(Fraction(integer(x, source)), target, mode) for x in a.tolist()]
    assert got.tolist() == expected


@pytest.mark.parametrize("source", REALS)
@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_floats_become_integers_rounded_and_clamped(source, target, mode):
    rng = np.random.default_rng(3)
    numbers = np.concatenate(
        [
            rng.normal(0, 100, 60),
            rng.integers(-40, 40, 40) / 2,
            np.exp2(rng.uniform(-3, 70, 40)),
            -np.exp2(rng.uniform(-3, 70, 40)),
            [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, 2.0**31, 2.0**63, 2.0**64, 127.5, 255.5],
        ]
    )
    if source == "f64":
        a = numbers.view(np.uint64)
    else:
        single = hard_singles(64, 4).view(np.float32)
        numbers = np.concatenate([numbers.astype(np.float32), single])
        with np.errstate(over="ignore"):
            a = {"f32": numbers, "f16": numbers.astype(np.float16)}.get(source, numbers)
        a = (a.view(np.uint32) >> 16).astype(np.uint16) if source == "bf16" else a.view(f"u{a.itemsize}")
    a = np.array([x for x in a.tolist() if not is_special(x, source)], a.dtype)
    got = execute(
        f"cvt.{mode}.{target}.{source} {REGISTERS[int(target[1:])]}0, {REGISTERS[REALS[source]]}1", a
    )
    low, high = limits(target)
    mask = (1 << max(int(target[1:]), 16)) - 1
    to_integer = {"rni": round, "rzi": int, "rmi": lambda x: x.__floor__(), "rpi": lambda x: x.__ceil__()}[
        mode
    ]
    for x, y in zip(a.tolist(), got.tolist(), strict=True):
        assert y == max(low, min(high, to_integer(value_of(x, source)[0]))) & mask, (x, y)


def test_infinities_and_nan_become_the_ends_and_zero_or_the_top_bit():
    a = bits([np.inf, -np.inf, np.nan])
    assert execute("cvt.rzi.s32.f32 %r0, %f1", a).tolist() == [2**31 - 1, 2**31, 0]
    assert execute("cvt.rzi.u32.f32 %r0, %f1", a).tolist() == [2**32 - 1, 0, 0]
    assert execute("cvt.rni.s64.f32 %d0, %f1", a).tolist() == [2**63 - 1, 2**63, 2**63]
    assert execute("cvt.rni.u64.f32 %d0, %f1", a).tolist() == [2**64 - 1, 0, 2**63]
    wide = np.array([np.inf, -np.inf, np.nan]).view(np.uint64)
    assert execute("cvt.rzi.s32.f64 %r0, %d1", wide).tolist() == [2**31 - 1, 2**31, 2**31]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("source", "target"), [("f64", "f32"), ("f32", "f16"), ("f32", "bf16"), ("f64", "f16")]
)
def test_floats_become_narrower_with_one_rounding(source, target, mode):
    if source == "f32":
        a = hard_singles(3000, 5)
        near = np.random.default_rng(6).integers(0x33000000, 0x47900000, 3000).astype(np.uint32)
        a = np.concatenate([a, near, near & 0xFFFFF000, near & 0xFFFF8000, near | 0x80000000])
    else:
        rng = np.random.default_rng(7)
        a = rng.normal(0, 1, 3000) * np.exp2(rng.integers(-160, 130, 3000))
        beside = a[np.abs(a) < 2.0**127].astype(np.float32) * (1 + 2.0**-24)
        a = np.concatenate([a, beside, a * 2.0**-20]).view(np.uint64)
    got = execute(f"cvt.{mode}.{target}.{source} {REGISTERS[REALS[target]]}0, {REGISTERS[REALS[source]]}1", a)
    expected = [rounded(*value_and_sign(x, source, target, mode)) for x in a.tolist()]
    np.testing.assert_array_equal(got, np.array(expected, got.dtype))


def value_and_sign(encoded, source, target, mode):
    value, sign = value_of(encoded, source)
    return value, target, mode, sign


def test_wider_floats_hold_the_same_value():
    half = np.arange(65536, dtype=np.uint16)
    values = half.view(np.float16)
    expected = np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.astype(np.float32).view(np.uint32))
    np.testing.assert_array_equal(execute("cvt.f32.f16 %f0, %h1", half), expected)
    brain = (half.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(execute("cvt.f32.bf16 %f0, %h1", half), brain.view(np.uint32))
    a = hard_singles(500, 8)
    got = execute("cvt.f64.f32 %d0, %f1", a)
    np.testing.assert_array_equal(got.view(np.float64), a.view(np.float32).astype(np.float64))


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_two_floats_become_a_pair_the_first_in_the_upper_half(target, mode):
    a, b = hard_singles(4000, 9), hard_singles(4000, 10)
    tie = {"f16": 0x1000, "bf16": 0x8000}[target]
    a = np.concatenate([a, a & np.uint32(-2 * tie & 2**32 - 1) | np.uint32(tie)])
    b = np.concatenate([b, b & np.uint32(-2 * tie & 2**32 - 1) | np.uint32(tie)])
    specials = u32(0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800001)
    a, b = np.concatenate([a, specials, a[:7]]), np.concatenate([b, b[:7], specials])
    got = execute(f"cvt.{mode}.{target}x2.f32 %r0, %f1, %f2", a, b)
    low = execute(f"cvt.{mode}.{target}.f32 %h0, %f1", b)
    high = execute(f"cvt.{mode}.{target}.f32 %h0, %f1", a)
    np.testing.assert_array_equal(got, high.astype(np.uint32) << 16 | low)
    assert (high[-14:-7] & 0x7FFF)[2:4].tolist() == [0x7FFF] * 2
    infinity = {"f16": 0x7C00, "bf16": 0x7F80}[target]
    assert high[-14] == infinity
    assert high[-13] == infinity | 0x8000


def test_relu_and_satfinite_of_conversions():
    a = bits([-1.0, 1e30, -1e30, np.nan, -0.0, np.inf])
    assert execute("cvt.rn.relu.f16.f32 %h0, %f1", a).tolist() == [0, 0x7C00, 0, 0x7FFF, 0, 0x7C00]
    clamped = [0xBC00, 0x7BFF, 0xFBFF, 0x7FFF, 0x8000, 0x7BFF]
    assert execute("cvt.rn.satfinite.f16.f32 %h0, %f1", a).tolist() == clamped
    both = execute("cvt.rn.relu.bf16x2.f32 %r0, %f1, %f2", a, a)
    assert [x >> 16 for x in both.tolist()] == [
        0,
        *(bits([1e30]) + 0x8000 >> 16).tolist(),
        0,
        0x7FFF,
        0,
        0x7F80,
    ]
    assert execute("cvt.sat.f32.f32 %f0, %f1", a).tolist() == bits([0, 1, 0, 0, 0, 1]).tolist()


def test_rounding_to_integral_keeps_the_type():
    a = bits([0.5, 1.5, -2.5, -0.25, 1e10, np.inf])
    for mode, function in {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.items():
        got = execute(f"cvt.{mode}.f32.f32 %f0, %f1", a)
        np.testing.assert_array_equal(got, function(a.view(np.float32)).view(np.uint32))


def test_ftz_flushes_float32_only():
    a = u32(1, 0x80000001, 0x00800000)
    assert execute("cvt.ftz.f64.f32 %d0, %f1", a).view(np.float64).tolist() == [0.0, -0.0, 2.0**-126]
    wide = np.array([2.0**-130, -(2.0**-130), 1.0]).view(np.uint64)
    assert execute("cvt.rn.ftz.f32.f64 %f0, %d1", wide).tolist() == [0, 0x80000000, 0x3F800000]


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32_keeps_ten_bits_of_the_fraction(mode):
    a = hard_singles(2000, 11)
    a = np.concatenate([a, a & 0xFFFFF000, (a & 0xFFFFE000) | 0x1000])
    got = execute(f"cvt.{mode}.tf32.f32 %r0, %f1", a).astype(np.int64)
    assert (got & 0x1FFF == 0).all()
    kept, rest = (a & 0xFFFFE000).astype(np.int64), (a & 0x1FFF).astype(np.int64)
    up = {"rz": rest < 0, "rna": rest >= 0x1000, "rn": rest + ((kept >> 13) & 1) > 0x1000}[mode]
    np.testing.assert_array_equal(got, kept + up * 0x2000)


def eight(code, element):
    """The value of an 8-bit float; None for NaN and infinities."""
    exponent_bits, fraction_bits = (4, 3) if element == "e4m3" else (5, 2)
    field, fraction = code >> fraction_bits & (1 << exponent_bits) - 1, code & (1 << fraction_bits) - 1
    top = (1 << exponent_bits) - 1
    if field == top and (element == "e5m2" or fraction == 7):
        return None
    bias = (1 << exponent_bits - 1) - 1
    value = Fraction(fraction + (1 << fraction_bits if field else 0)) * Fraction(2) ** (
        max(field, 1) - bias - fraction_bits
    )
    return -value if code & 0x80 else value


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_eight_bit_floats_are_the_nearest_and_come_back(element):
    codes = [code for code in range(128) if eight(code, element) is not None]
    values = [eight(code, element) for code in codes]
    a = np.concatenate(
        [
            np.array(values, np.float32),
            np.array([(x + y) / 2 for x, y in pairwise(values)], np.float32),
            np.abs(np.random.default_rng(12).normal(0, 1, 500)).astype(np.float32),
            np.exp2(np.random.default_rng(13).uniform(-20, 20, 500)).astype(np.float32),
        ]
    )
    numbers = np.array(values, np.float64)
    got = execute(f"cvt.rn.satfinite.{element}x2.f32 %h0, %f1, %f2", bits(-a), bits(a))
    for x, pair in zip(a.tolist(), got.tolist(), strict=True):
        assert pair >> 8 == pair & 0xFF | 0x80
        distance = np.abs(x - numbers)
        best = [codes[n] for n in np.flatnonzero(distance == distance.min())]
        wanted = best[0] if len(best) == 1 else next(code for code in best if code % 2 == 0)
        assert pair & 0xFF == wanted, x
    specials = execute(
        f"cvt.rn.satfinite.{element}x2.f32 %h0, %f1, %f2", bits([np.nan, -np.inf]), bits([np.inf, 0])
    )
    top = {"e4m3": 0x7E, "e5m2": 0x7B}[element]
    assert specials.tolist() == [0x7F00 | top, (top | 0x80) << 8]
    every = np.arange(65536, dtype=np.uint16)
    wide = execute(f"cvt.rn.f16x2.{element}x2 %r0, %h1", every)
    numbers = wide.view(np.float16).astype(np.float64)
    for code, number in zip(every.view(np.uint8)[:512].tolist(), numbers[:512].tolist(), strict=True):
        value = eight(code, element)
        assert (number == value) if value is not None else not np.isfinite(number)
    back = execute(f"cvt.rn.satfinite.{element}x2.f16x2 %h0, %r1", wide)
    finite = np.isfinite(numbers)
    np.testing.assert_array_equal(back.view(np.uint8)[finite], every.view(np.uint8)[finite])


@pytest.mark.parametrize(
    "line",
    [
        "cvt.rn.s32.f32 %r0, %f1",
        "cvt.f16.f32 %h0, %f1",
        "cvt.rni.f32.f64 %f0, %d1",
        "cvt.rn.e4m3x2.f32 %h0, %f1, %f2",
        "cvt.rs.f16x2.f32 %r0, %f1, %f2, %r3",
        "cvt.rn.relu.f32.f64 %f0, %d1",
        "cvt.s64.s32 %r0, %r1",
        "cvt.rn.bf16x2.f32 %r0, %f1",
        "cvt.rn.ue8m0x2.f32 %h0, %f1, %f2",
    ],
)
def test_forms_that_do_not_exist_are_errors(line):
    with pytest.raises(UnsupportedInstruction, match=r"cvt\."):
        bound(line)
