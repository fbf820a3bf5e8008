"""Floating-point arithmetic against rational numbers: one rounding, zeros, NaN, flushing, clamping."""

from itertools import product

import numpy as np
import pytest

from isa_lines import CANONICAL, bits, exact, execute, hard_singles, is_special, rounded, u32, value_of

NAN, INF, NINF = 0x7FFFFFFF, 0x7F800000, 0xFF800000
LINES = {
    "add": "add.{mode}.f32 %f0, %f1, %f2",
    "sub": "sub.{mode}.f32 %f0, %f1, %f2",
    "mul": "mul.{mode}.f32 %f0, %f1, %f2",
    "fma": "fma.{mode}.f32 %f0, %f1, %f2, %f3",
}


@pytest.mark.parametrize("operation", LINES)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_float32_arithmetic_rounds_the_exact_result_once(operation, mode):
    count = 6000
    sources = [hard_singles(count, seed) for seed in range(3 if operation == "fma" else 2)]
    result = execute(LINES[operation].format(mode=mode), *sources)
    expected = [
        exact(operation, mode, "f32", *lane) for lane in zip(*(s.tolist() for s in sources), strict=True)
    ]
    np.testing.assert_array_equal(result, np.array(expected, np.uint32))


@pytest.mark.parametrize("operation", LINES)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_zero_results_have_the_sign_of_their_rounding_mode(operation, mode):
    values = [0, 0x80000000, *bits([1.0, -1.0, 1.5, -1.5, 2.25, -2.25]).tolist(), 1, 0x80000001]
    count = 3 if operation == "fma" else 2
    sources = [np.array(column, np.uint32) for column in zip(*product(values, repeat=count), strict=True)]
    result = execute(LINES[operation].format(mode=mode), *sources)
    expected = [
        exact(operation, mode, "f32", *lane) for lane in zip(*(s.tolist() for s in sources), strict=True)
    ]
    np.testing.assert_array_equal(result, np.array(expected, np.uint32))
    assert {0, 0x80000000} <= set(expected)


def near_ties(count, seed):
    """a, b, c whose a * b + c lies upon a tie of float32 or a little beside it, on either side."""
    rng = np.random.default_rng(seed)
    half = 1 << 12
    a = (rng.integers(half, 2 * half, count) * 2 + 1).astype(np.float32)
    b = np.float32(2.0) ** rng.integers(-3, 4, count).astype(np.float32)
    scale = rng.choice([24, 25, 26, 40, 60, 100], count)
    c = (
        a
        * b
        * np.float32(2.0) ** -scale.astype(np.float32)
        * rng.choice([1, -1, 0], count).astype(np.float32)
    )
    wide = (rng.integers(2**23, 2**24, count) * 2 + 1).astype(np.float64)
    first = np.float32(2.0**12 + 1) * np.ones(count, np.float32)
    second = (wide / first).astype(np.float32)
    pick = rng.integers(0, 2, count).astype(bool)
    return [
        x.astype(np.float32).view(np.uint32) for x in (np.where(pick, first, a), np.where(pick, second, b), c)
    ]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_is_right_where_two_roundings_would_be_wrong(mode):
    # (2**24 + 1 as a product) is a tie of float32; the addend is too small for float64 to see it.
    tie_low, tie_high = bits(2.0**12 + 1), bits(2.0**12)
    cases = []
    for tiny in (2.0**-40, -(2.0**-40), 2.0**-149, -(2.0**-149), 0.0):
        cases.append((bits(257.0), bits(65281.0), bits(tiny)))  # 2**24 + 1
        cases.append((bits(-257.0), bits(65281.0), bits(tiny)))
        cases.append((bits(2.0**-75), bits(2.0**-75), bits(tiny)))  # half of the least subnormal
        cases.append((bits(3 * 2.0**-75), bits(2.0**-75), bits(tiny)))
        cases.append((bits(2.0**-75), bits(-(2.0**-75)), bits(tiny)))
        cases.append((tie_low, tie_high, bits(tiny)))
    cases += [(INF, bits(1.0), bits(0.0))]
    sources = [np.array([case[n] for case in cases[:-1]], np.uint32) for n in range(3)]
    sources = [np.concatenate([s, t]) for s, t in zip(sources, near_ties(4000, 7), strict=True)]
    result = execute(f"fma.{mode}.f32 %f0, %f1, %f2, %f3", *sources)
    expected = [exact("fma", mode, "f32", *lane) for lane in zip(*(s.tolist() for s in sources), strict=True)]
    np.testing.assert_array_equal(result, np.array(expected, np.uint32))
    if mode == "rn":
        a, b, c = (s.view(np.float32).astype(np.float64) for s in sources)
        twice = (a * b + c).astype(np.float32).view(np.uint32)
        assert (twice != result).sum() >= 4, "the cases must tell one rounding from two"


@pytest.mark.parametrize("operation", ["add", "mul", "fma"])
def test_nan_results_have_the_canonical_bits(operation):
    sources = [
        u32(0x7FC01234, 0xFFC00001, INF, NINF, 0, bits(1.0)),
        u32(0, 0x7F800001, NINF, INF, INF, bits(2.0)),
    ]
    if operation == "fma":
        sources.append(u32(0, 0, INF, 0x7FC00007, 0, bits(3.0)))
    result = execute(LINES[operation].format(mode="rn"), *sources)
    specials = {"add": [0, 1, 2, 3], "mul": [0, 1, 4], "fma": [0, 1, 2, 3, 4]}[operation]
    assert all(result[n] == NAN for n in specials)
    assert result[5] == bits({"add": 3.0, "mul": 2.0, "fma": 5.0}[operation])
    if operation == "add":
        assert result[4] == INF


def test_infinities_and_overflow_follow_the_rounding_mode():
    big = u32(0x7F7FFFFF, 0xFF7FFFFF, INF, NINF)
    for mode, expected in {
        "rn": [INF, NINF, INF, NINF],
        "rz": [0x7F7FFFFF, 0xFF7FFFFF, INF, NINF],
        "rm": [0x7F7FFFFF, NINF, INF, NINF],
        "rp": [INF, 0xFF7FFFFF, INF, NINF],
    }.items():
        np.testing.assert_array_equal(execute(f"add.{mode}.f32 %f0, %f1, %f1", big, big), u32(*expected))
        np.testing.assert_array_equal(
            execute(f"mul.{mode}.f32 %f0, %f1, 0f40000000", big), u32(*expected), err_msg=mode
        )


def test_ftz_flushes_subnormal_sources_and_results_and_keeps_their_sign():
    least = 0x00800000
    a = u32(1, 0x80000001, least, 0x80000000 | least, 0x007FFFFF, bits(1.0))
    result = execute("add.ftz.f32 %f0, %f1, %f2", a, u32(0, 0x80000000, 0, 0x80000000, 0x007FFFFF, 5))
    np.testing.assert_array_equal(result, u32(0, 0x80000000, least, 0x80000000 | least, 0, bits(1.0)))
    half = np.full(6, bits(0.5))
    np.testing.assert_array_equal(
        execute("mul.ftz.f32 %f0, %f1, %f2", a, half), u32(0, 0x80000000, 0, 0x80000000, 0, bits(0.5))
    )
    assert execute("mul.f32 %f0, %f1, %f2", a, half)[2] == 0x00400000


def test_sat_clamps_to_zero_and_one_and_nan_to_plus_zero():
    a = bits([2.0, -1.0, 0.25, -0.0, np.nan, np.inf])
    result = execute("add.sat.f32 %f0, %f1, %f2", a, bits([0.0, 0.0, 0.25, -0.0, 0.0, 1.0]))
    np.testing.assert_array_equal(result, bits([1.0, 0.0, 0.5, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_half_arithmetic_rounds_the_exact_result_once(kind, operation):
    rng = np.random.default_rng(5)
    count = 3 if operation == "fma" else 2
    sources = [rng.integers(0, 65536, 1200, dtype=np.uint16) for _ in range(count)]
    keep = np.array([not any(is_special(int(x), kind) for x in lane) for lane in zip(*sources, strict=True)])
    sources = [source[keep][:960] for source in sources]
    expected = [
        exact(operation, "rn", kind, *lane) for lane in zip(*(s.tolist() for s in sources), strict=True)
    ]
    registers = ", ".join(f"%h{n}" for n in range(count + 1))
    result = execute(f"{operation}.rn.{kind} {registers}", *sources)
    np.testing.assert_array_equal(result, np.array(expected, np.uint16))
    registers = ", ".join(f"%r{n}" for n in range(count + 1))
    packed = execute(f"{operation}.rn.{kind}x2 {registers}", *(source.view(np.uint32) for source in sources))
    np.testing.assert_array_equal(packed.view(np.uint16), np.array(expected, np.uint16))


def test_half_nan_is_canonical_and_relu_clamps_negative_results():
    a = np.array([0x7C01, 0xBC00, 0x3C00, 0xFC00], np.uint16)
    one, zero = np.full(4, 0x3C00, np.uint16), np.zeros(4, np.uint16)
    result = execute("fma.rn.relu.f16 %h0, %h1, %h2, %h3", a, one, zero)
    np.testing.assert_array_equal(result, np.array([CANONICAL["f16"], 0, 0x3C00, 0], np.uint16))


@pytest.mark.parametrize("operation", ["add", "mul", "fma"])
@pytest.mark.parametrize("mode", ["rn", "rm"])
def test_packed_float32_computes_both_halves(operation, mode):
    count = 3 if operation == "fma" else 2
    sources = [hard_singles(128, seed + 10) for seed in range(count)]
    registers = ", ".join(f"%d{n}" for n in range(count + 1))
    packed = execute(f"{operation}.{mode}.f32x2 {registers}", *(source.view(np.uint64) for source in sources))
    single = execute(LINES[operation].format(mode=mode), *sources)
    np.testing.assert_array_equal(packed.view(np.uint32), single)


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_float64_arithmetic_rounds_the_exact_result_once(operation, mode):
    rng = np.random.default_rng(3)
    count = 3 if operation == "fma" else 2
    sources = [rng.integers(0, 2**64, 64, dtype=np.uint64) for _ in range(count)]
    for source in sources:
        source[:32] = (source[:32] & np.uint64(0x800FFFFFFFFFFFFF)) | np.uint64(1020 << 52)
        source[32:40] &= np.uint64(0x8000000000000003)
        source[(source >> np.uint64(52) & np.uint64(0x7FF)) == 0x7FF] = 0
    registers = ", ".join(f"%d{n}" for n in range(count + 1))
    result = execute(f"{operation}.{mode}.f64 {registers}", *sources)
    expected = [
        exact(operation, mode, "f64", *lane) for lane in zip(*(s.tolist() for s in sources), strict=True)
    ]
    np.testing.assert_array_equal(result, np.array(expected, np.uint64))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_division_reciprocal_and_root_are_correctly_rounded(mode):
    a, b = hard_singles(600, 21), hard_singles(600, 22)
    b = np.where(b & 0x7FFFFFFF == 0, bits(3.0), b).astype(np.uint32)
    quotient = execute(f"div.{mode}.f32 %f0, %f1, %f2", a, b)
    inverse = execute(f"rcp.{mode}.f32 %f0, %f1", b)
    for x, y, q, r in zip(a.tolist(), b.tolist(), quotient.tolist(), inverse.tolist(), strict=True):
        (xv, xs), (yv, ys) = value_of(x, "f32"), value_of(y, "f32")
        assert q == rounded(xv / yv, "f32", mode, xs ^ ys)
        assert r == rounded(1 / yv, "f32", mode)
    positive = a & 0x7FFFFFFF
    for x, root in zip(
        positive.tolist(), execute(f"sqrt.{mode}.f32 %f0, %f1", positive).tolist(), strict=True
    ):
        value, _ = value_of(x, "f32")
        below, above = value_of(root - 1, "f32")[0] if root else 0, value_of(root + 1, "f32")[0]
        at = value_of(root, "f32")[0]
        if mode == "rn":
            assert ((below + at) / 2) ** 2 <= value <= ((above + at) / 2) ** 2
        elif mode == "rp":
            assert below**2 < value or root == 0
            assert value <= at**2
        else:
            assert at**2 <= value < above**2


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_min_and_max_order_zeros_and_leave_nan_out(name, kind):
    codes = {"f32": (bits, "%f"), "f16": (lambda x: np.float16(x).view(np.uint16), "%h")}
    encode, prefix = codes.get(kind, (lambda x: (bits(x) >> 16).astype(np.uint16), "%h"))
    values = [0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan]
    pairs = [(x, y) for x in values for y in values]
    a, b = (np.array([encode(pair[n]) for pair in pairs]) for n in range(2))
    line = f"{name}{{}}.{kind} {prefix}0, {prefix}1, {prefix}2"
    result, strict = execute(line.format(""), a, b), execute(line.format(".NaN"), a, b)

    def key(x):
        return (x, not np.signbit(x))

    for (x, y), got, with_nan in zip(pairs, result.tolist(), strict.tolist(), strict=True):
        if np.isnan(x) or np.isnan(y):
            assert with_nan == CANONICAL[kind]
        if np.isnan(x) and np.isnan(y):
            assert got == CANONICAL[kind]
        elif np.isnan(x) or np.isnan(y):
            assert got == int(encode(y if np.isnan(x) else x))
        else:
            assert got == with_nan == int(encode((min if name == "min" else max)(x, y, key=key)))


def test_max_takes_three_sources_and_xorsign_abs():
    a, b, c = bits([1, -5, np.nan]), bits([2, -7, np.nan]), bits([3, -6, 4])
    np.testing.assert_array_equal(execute("max.f32 %f0, %f1, %f2, %f3", a, b, c), bits([3, -5, 4]))
    np.testing.assert_array_equal(execute("min.f32 %f0, %f1, %f2, %f3", a, b, c), bits([1, -7, 4]))
    a, b = bits([1, -5, 2, -0.5]), bits([-2, -7, 1, 0.25])
    np.testing.assert_array_equal(execute("max.xorsign.abs.f32 %f0, %f1, %f2", a, b), bits([-2, 7, 2, -0.5]))
    np.testing.assert_array_equal(execute("min.xorsign.abs.f32 %f0, %f1, %f2", a, b), bits([-1, 5, 1, -0.25]))


def test_signs_change_without_arithmetic():
    a = u32(bits(1.5), bits(-1.5), 0x80000000, 0xC0491234, 1)
    np.testing.assert_array_equal(execute("neg.f32 %f0, %f1", a), a ^ np.uint32(0x80000000))
    np.testing.assert_array_equal(execute("abs.f32 %f0, %f1", a), a & np.uint32(0x7FFFFFFF))
    np.testing.assert_array_equal(execute("neg.bf16x2 %r0, %r1", a), a ^ np.uint32(0x80008000))
    np.testing.assert_array_equal(execute("abs.f16x2 %r0, %r1", a), a & np.uint32(0x7FFF7FFF))
    assert execute("abs.ftz.f32 %f0, %f1", a)[4] == 0
    sign = execute("copysign.f32 %f0, %f1, %f2", a, np.full(5, bits(2.0)))
    np.testing.assert_array_equal(sign, bits([2.0, -2.0, -2.0, -2.0, 2.0]))


def test_a_nan_becomes_the_canonical_one_when_its_sign_is_changed():
    for name in ("abs", "neg", "neg.ftz"):
        assert execute(f"{name}.f32 %f0, %f1", u32(0xFFC01234)).tolist() == [NAN]
    assert execute("neg.bf16x2 %r0, %r1", u32(0xFFC07F80)).tolist() == [0x7FFFFF80]
    assert execute("abs.f16x2 %r0, %r1", u32(0x7C01FC00)).tolist() == [0x7FFF7C00]
    assert execute("neg.f64 %d0, %d1", np.array([0x7FF8000000000001], np.uint64)).tolist() == [
        0xFFF8000000000001
    ]


def test_testp_tells_classes_apart():
    a = u32(bits(1.0), 1, 0, INF, NAN)
    classes = {
        "finite": [1, 1, 1, 0, 0],
        "infinite": [0, 0, 0, 1, 0],
        "number": [1, 1, 1, 1, 0],
        "notanumber": [0, 0, 0, 0, 1],
        "normal": [1, 0, 1, 0, 0],
        "subnormal": [0, 1, 0, 0, 0],
    }
    for name, expected in classes.items():
        assert execute(f"testp.{name}.f32 %p0, %f1", a).tolist() == [bool(x) for x in expected]


def test_mixed_precision_adds_halves_to_single_precision():
    a, b, c = np.array([0x3F80, 0x4049], np.uint16), np.array([0x3F80, 0x4000], np.uint16), bits([0.5, 1e-3])
    wide = [(x.astype(np.uint32) << 16).view(np.float32) for x in (a, b)]
    np.testing.assert_array_equal(
        execute("fma.rn.f32.bf16 %f0, %h1, %h2, %f3", a, b, c), bits(wide[0] * wide[1] + c.view(np.float32))
    )
    np.testing.assert_array_equal(
        execute("add.f32.bf16 %f0, %h1, %f3", a, c), bits(wide[0] + c.view(np.float32))
    )
