"""Numbers of 4 and 6 bits, and scales of 8, by the definition of their formats."""

import itertools
import math

import numpy as np
import pytest

from attn4.emulator.isa.registry import UnsupportedInstruction
from isa_lines import bits, bound, execute, u32

FORMATS = {"e2m1": (2, 1, 1, 4), "e2m3": (2, 3, 1, 6), "e3m2": (3, 2, 3, 6)}
"""Bits of exponent and fraction, bias, bits in all."""


def value(code, kind):
    exponent, fraction, bias, width = FORMATS[kind]
    e, m = code >> fraction & (1 << exponent) - 1, code & (1 << fraction) - 1
    magnitude = (1 + m / 2**fraction) * 2.0 ** (e - bias) if e else m / 2**fraction * 2.0 ** (1 - bias)
    return -magnitude if code >> width - 1 else magnitude


def nearest(x, kind, relu=False):
    """The code of the nearest value, ties to even; NaN to the greatest."""
    width = FORMATS[kind][3]
    half = 1 << width - 1
    if math.isnan(x):
        return half - 1
    sign = half if math.copysign(1, x) < 0 else 0
    code = min(range(half), key=lambda c: (abs(value(c, kind) - abs(x)), c % 2))
    if abs(x) >= value(half - 1, kind):
        code = half - 1
    return 0 if relu and sign else sign | code


def samples(kind):
    rng = np.random.default_rng(5)
    half = 1 << FORMATS[kind][3] - 1
    exact = [value(c, kind) for c in range(half)]
    ties = [(x + y) / 2 for x, y in itertools.pairwise(exact)]
    near = [np.nextafter(np.float32(t), np.float32(d)) for t in ties for d in (0, 100)]
    numbers = [*exact, *ties, *near, *rng.normal(0, 3, 40), 1e30, math.inf, math.nan, 1e-30, 0.0]
    numbers += [-x for x in numbers]
    return np.array(numbers + [0.0] * (-len(numbers) % 32), np.float32)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_two_numbers_become_a_pair_of_narrow_ones(kind, relu):
    a = samples(kind)
    b = a[::-1].copy()
    got = execute(f"cvt.rn.satfinite{relu}.{kind}x2.f32 %h1, %f1, %f2", a.view(np.uint32), b.view(np.uint32))
    shift = 4 if kind == "e2m1" else 8
    for x, y, pair in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        assert pair == nearest(x, kind, bool(relu)) << shift | nearest(y, kind, bool(relu)), (x, y)


@pytest.mark.parametrize("kind", FORMATS)
def test_narrow_numbers_become_halves(kind):
    width = FORMATS[kind][3]
    shift = 4 if kind == "e2m1" else 8
    codes = np.arange(1 << width)
    a = (codes << shift | codes[::-1]).astype(np.uint16)
    got = execute(f"cvt.rn.f16x2.{kind}x2 %r1, %h1", a).view(np.float16).reshape(-1, 2)
    values = [value(int(c), kind) for c in codes]
    np.testing.assert_array_equal(got[:, 1], values)
    np.testing.assert_array_equal(got[:, 0], values[::-1])
    positive = execute(f"cvt.rn.relu.f16x2.{kind}x2 %r1, %h1", a).view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(positive[:, 1], np.maximum(values, 0))


NUMBERS = [
    1.0,
    1.5,
    2.0,
    0.75,
    -3.0,
    0.0,
    2.0**-127,
    2.0**-126,
    1.5 * 2.0**-127,
    3e38,
    math.inf,
    math.nan,
    1e-44,
]


@pytest.mark.parametrize("mode", ["rz", "rp"])
@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
def test_scales_are_the_exponents(mode, satfinite):
    def code(x):
        if math.isnan(x):
            return 255
        if math.isinf(x):
            return 254 if satfinite else 255
        if abs(x) < 2.0**-127:
            return 0
        mantissa, exponent = math.frexp(abs(x))
        return min(exponent - 1 + (mode == "rp" and mantissa != 0.5) + 127, 254 if satfinite else 255)

    a = bits(NUMBERS)
    got = execute(f"cvt.{mode}{satfinite}.ue8m0x2.f32 %h1, %f1, %f2", a, a[::-1].copy())
    expected = [code(float(np.float32(x))) for x in NUMBERS]
    assert (got >> 8).tolist() == expected
    assert (got & 255).tolist() == expected[::-1]
    brain = (a >> np.uint32(16)) | np.uint32(0x3F800000)
    both = execute(f"cvt.{mode}{satfinite}.ue8m0x2.bf16x2 %h1, %r1", brain)
    assert (both >> 8).tolist() == [127] * len(NUMBERS)


def test_scales_become_powers_of_two():
    got = execute("cvt.rn.bf16x2.ue8m0x2 %r1, %h1", np.array([0x7F80, 0x00FE, 0xFF01], np.uint16))
    values = (got.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(-1, 2)
    assert values[0].tolist() == [2.0, 1.0]
    assert values[1].tolist() == [2.0**127, 2.0**-127]
    assert values[2, 0] == 2.0**-126
    assert math.isnan(values[2, 1])


def test_integers_are_clamped_and_packed():
    a, b, c = u32(5, 70000, -70000 & 2**32 - 1), u32(-3 & 2**32 - 1, 40000, 300), u32(0x12345678, 1, 2)
    assert execute("cvt.pack.sat.s16.s32 %r1, %r2, %r3", a, b).tolist() == [
        0x0005FFFD,
        0x7FFF7FFF,
        0x8000012C,
    ]
    assert execute("cvt.pack.sat.u16.s32 %r1, %r2, %r3", a, b).tolist() == [0x00050000, 0xFFFF9C40, 300]
    got = execute("cvt.pack.sat.s8.s32.b32 %r1, %r2, %r3, %r4", a, b, c)
    assert got.tolist() == [0x567805FD, 0x00017F7F, 0x0002807F]


@pytest.mark.parametrize(
    "line",
    [
        "cvt.rz.satfinite.e2m1x2.f32 %h1, %f1, %f2",
        "cvt.rn.e2m3x2.f32 %h1, %f1, %f2",
        "cvt.rn.ue8m0x2.f32 %h1, %f1, %f2",
        "cvt.rn.bf16x2.e2m1x2 %r1, %h1",
        "cvt.rs.satfinite.e2m1x4.f32 %h1, {%f1, %f2, %f3, %f4}, %r1",
    ],
)
def test_conversions_that_do_not_exist_are_refused(line):
    with pytest.raises(UnsupportedInstruction, match=r"line \d+: cvt\."):
        bound(line)
