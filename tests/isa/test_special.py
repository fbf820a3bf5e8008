"""Approximate functions against float64: PTX's bounds, special values, and a recorded function."""

import numpy as np
import pytest

from attn4.emulator.isa import special
from isa_lines import bits, execute, hard_singles, u32

INF, NINF, NAN = 0x7F800000, 0xFF800000, 0x7FFFFFFF


def relative(got, exact):
    return np.abs(got.view(np.float32).astype(np.float64) - exact) / np.abs(exact)


@pytest.mark.parametrize(
    ("name", "function", "low", "high", "bound"),
    [
        ("ex2", np.exp2, -125.0, 127.0, 2.0**-22),
        ("rcp", lambda x: 1 / x, 1e-30, 1e30, 2.0**-23),
        ("sqrt", np.sqrt, 1e-30, 1e30, 2.0**-23),
        ("rsqrt", lambda x: x**-0.5, 1e-30, 1e30, 2.0**-22.9),
        ("tanh", np.tanh, -9.0, 9.0, 2.0**-11),
        ("lg2", np.log2, 2.5, 1e30, 2.0**-22),
    ],
)
def test_results_lie_within_the_bound_of_the_manual(name, function, low, high, bound):
    a = np.random.default_rng(1).uniform(low, high, 5000).astype(np.float32)
    got = execute(f"{name}.approx.f32 %f0, %f1", bits(a))
    assert relative(got, function(a.astype(np.float64))).max() <= bound


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sine_and_cosine(name):
    a = np.random.default_rng(2).uniform(-6.28, 6.28, 5000).astype(np.float32)
    got = execute(f"{name}.approx.f32 %f0, %f1", bits(a)).view(np.float32)
    assert np.abs(got - getattr(np, name)(a.astype(np.float64))).max() <= 2.0**-20.5


@pytest.mark.parametrize(
    ("line", "values", "expected"),
    [
        ("ex2.approx.ftz.f32", [NINF, INF, 0, NAN], [0, INF, 0x3F800000, NAN]),
        ("ex2.approx.ftz.f32", [0x80000001, 1, 0x80000000], [0x3F800000] * 3),
        (
            "ex2.approx.ftz.f32",
            bits([-126.0, -126.5, -149.0, 128.0, 3.0]),
            [0x00800000, 0, 0, INF, 0x41000000],
        ),
        ("ex2.approx.f32", bits([-149.0, -127.0, -150.0]), [1, 0x00400000, 0]),
        (
            "lg2.approx.ftz.f32",
            [0, 0x80000000, 1, INF, 0xBF800000, 0x3F800000],
            [NINF, NINF, NINF, INF, NAN, 0],
        ),
        ("lg2.approx.f32", [1], bits([-149.0])),
        ("rcp.approx.ftz.f32", [0, 0x80000000, INF, NINF, 1, NAN], [INF, NINF, 0, 0x80000000, INF, NAN]),
        ("rcp.approx.ftz.f32", bits([2.0**127, 4.0]), [0, 0x3E800000]),
        ("rcp.approx.f32", bits([2.0**127]), [0x00400000]),
        ("rsqrt.approx.ftz.f32", [0, 0x80000000, INF, NINF, 1], [INF, NINF, 0, NAN, INF]),
        (
            "sqrt.approx.ftz.f32",
            [0, 0x80000000, INF, NINF, 0x80000001],
            [0, 0x80000000, INF, NAN, 0x80000000],
        ),
        ("tanh.approx.f32", [0, 0x80000000, INF, NINF, NAN], [0, 0x80000000, 0x3F800000, 0xBF800000, NAN]),
        ("sin.approx.ftz.f32", [0, 0x80000000, INF], [0, 0x80000000, NAN]),
    ],
)
def test_special_values(line, values, expected):
    assert execute(f"{line} %f0, %f1", u32(*values)).tolist() == list(map(int, expected))


def test_halves_are_rounded_once_more():
    every = np.arange(65536, dtype=np.uint16)
    with np.errstate(all="ignore"):
        exact = np.exp2(every.view(np.float16).astype(np.float64)).astype(np.float16)
        got = execute("ex2.approx.f16 %h0, %h1", every).view(np.float16)
        finite = np.isfinite(exact) & (exact != 0)
        error = np.abs(got[finite].astype(np.float64) / exact[finite].astype(np.float64) - 1)
    assert error.max() <= 2.0**-9.9
    assert (execute("ex2.approx.f16 %h0, %h1", every)[np.isnan(every.view(np.float16))] == 0x7FFF).all()
    pairs = execute("ex2.approx.f16x2 %r0, %r1", every.view(np.uint32))
    np.testing.assert_array_equal(pairs.view(np.uint16), got.view(np.uint16))
    brain = execute("tanh.approx.bf16 %h0, %h1", np.array([0x3F80, 0xBF80, 0x0000], np.uint16))
    assert brain.tolist() == [0x3F43, 0xBF43, 0]


def test_a_recorded_function_takes_the_place_of_the_default(monkeypatch):
    monkeypatch.setattr(special, "APPROXIMATIONS", dict(special.APPROXIMATIONS))
    special.record("ex2", lambda x: np.full_like(x, 7.0))
    assert execute("ex2.approx.ftz.f32 %f0, %f1", bits([1.0])).tolist() == bits([7.0]).tolist()
    assert execute("ex2.approx.ftz.f32 %f0, %f1", bits([-130.0])).tolist() == [0]
    with pytest.raises(KeyError, match="ex3"):
        special.record("ex3", np.exp2)


def test_approximate_division_gives_zero_for_huge_divisors():
    a, b = bits([1.0, np.inf, 6.0]), bits([2.0**127, 2.0**127, 3.0])
    assert execute("div.approx.f32 %f0, %f1, %f2", a, b).tolist() == [0, NAN, bits(2.0)]
    assert execute("div.full.f32 %f0, %f1, %f2", a, b).tolist() == [0x00400000, INF, bits(2.0)]


def test_flushed_functions_agree_with_the_others_on_normal_numbers():
    a = hard_singles(2000, 3)
    a = a[(a >> 23 & 0xFF) > 0]
    for name in ("rcp", "sqrt", "rsqrt", "lg2"):
        plain, flushed = (execute(f"{name}.approx{ftz}.f32 %f0, %f1", a) for ftz in ("", ".ftz"))
        normal = (plain >> 23 & 0xFF) > 0
        np.testing.assert_array_equal(plain[normal], flushed[normal])
