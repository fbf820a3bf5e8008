"""Integer arithmetic against Python's integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn4.emulator.isa.registry import CARRY, UnsupportedInstruction
from isa_lines import bound, execute, u32

WIDTHS = {"16": "%h", "32": "%r", "64": "%d"}
KINDS = [f"{sign}{bits}" for sign in "us" for bits in WIDTHS]


def interesting(bits, count, seed):
    """Random integers of all magnitudes, and those at the ends."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**64, count, dtype=np.uint64) >> rng.integers(0, bits, count).astype(np.uint64)
    edges = np.array([0, 1, 2, 2**bits - 1, 2**bits - 2, 2 ** (bits - 1), 2 ** (bits - 1) - 1], np.uint64)
    values[:49] = np.tile(edges, 7) if seed % 2 else np.repeat(edges, 7)
    return values.astype(f"u{bits // 8}")


def number(pattern, kind):
    bits = int(kind[1:])
    pattern = int(pattern) & (1 << bits) - 1
    return pattern - (1 << bits) if kind[0] == "s" and pattern >> bits - 1 else pattern


def check(name, kind, function, operands, *, result=None):
    """`name.kind` on interesting operands is `function` of the numbers, modulo the width."""
    bits = kind[1:]
    result = result or kind
    sources = [interesting(int(bits), 96, seed) for seed in range(operands)]
    register = WIDTHS[bits]
    line = f"{name}.{kind} {WIDTHS[result[1:]]}0, " + ", ".join(f"{register}{n + 1}" for n in range(operands))
    got = execute(line, *sources)
    mask = (1 << int(result[1:])) - 1
    expected = [
        function(*(number(x, kind) for x in lane)) & mask
        for lane in zip(*(s.tolist() for s in sources), strict=True)
    ]
    np.testing.assert_array_equal(got, np.array(expected, got.dtype), err_msg=line)


def truncated(a, b):
    return 2**64 - 1 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a, b):
    return 2**64 - 1 if b == 0 else a - b * truncated(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_basic_arithmetic_is_that_of_the_integers(kind):
    bits = int(kind[1:])
    check("add", kind, lambda a, b: a + b, 2)
    check("sub", kind, lambda a, b: a - b, 2)
    check("mul.lo", kind, lambda a, b: a * b, 2)
    check("mul.hi", kind, lambda a, b: a * b >> bits, 2)
    check("mad.lo", kind, lambda a, b, c: a * b + c, 3)
    check("mad.hi", kind, lambda a, b, c: (a * b >> bits) + c, 3)
    check("sad", kind, lambda a, b, c: c + abs(a - b), 3)
    check("min", kind, min, 2)
    check("max", kind, max, 2)
    check("div", kind, truncated, 2)
    check("rem", kind, remainder, 2)
    if kind[0] == "s":
        check("abs", kind, abs, 1)
        check("neg", kind, lambda a: -a, 1)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products_are_whole(kind):
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    check("mul.wide", kind, lambda a, b: a * b, 2, result=wide)
    a, b = interesting(int(kind[1:]), 96, 0), interesting(int(kind[1:]), 96, 1)
    c = interesting(int(wide[1:]), 96, 2)
    register, wide_register = WIDTHS[kind[1:]], WIDTHS[wide[1:]]
    got = execute(f"mad.wide.{kind} {wide_register}0, {register}1, {register}2, {wide_register}3", a, b, c)
    for x, y, z, w in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        assert w == (number(x, kind) * number(y, kind) + z) % 2 ** int(wide[1:])


def test_saturation_clamps_to_the_ends_of_the_range():
    top, bottom = 2**31 - 1, -(2**31)
    check("add.sat", "s32", lambda a, b: max(bottom, min(top, a + b)), 2)
    check("sub.sat", "s32", lambda a, b: max(bottom, min(top, a - b)), 2)
    check("mad.hi.sat", "s32", lambda a, b, c: max(bottom, min(top, (a * b >> 32) + c)), 3)
    check("min.relu", "s32", lambda a, b: max(0, min(a, b)), 2)
    check("max.relu", "s32", lambda a, b: max(0, a, b), 2)


def test_pairs_of_16_bits_do_not_carry_into_each_other():
    a, b = interesting(32, 96, 0), interesting(32, 96, 1)
    got = execute("add.u16x2 %r0, %r1, %r2", a, b)
    np.testing.assert_array_equal(got.view(np.uint16), a.view(np.uint16) + b.view(np.uint16))
    got = execute("max.s16x2 %r0, %r1, %r2", a, b)
    np.testing.assert_array_equal(got.view(np.int16), np.maximum(a.view(np.int16), b.view(np.int16)))
    got = execute("min.relu.s16x2 %r0, %r1, %r2", a, b)
    np.testing.assert_array_equal(got.view(np.int16), np.minimum(a.view(np.int16), b.view(np.int16)).clip(0))


@settings(max_examples=60, deadline=None)
@given(*[st.integers(0, 2**96 - 1)] * 3)
def test_carries_make_long_arithmetic(x, y, z):
    def limbs(value):
        return [u32(value >> shift & 2**32 - 1) for shift in (0, 32, 64)]

    def joined(parts):
        return sum(int(part[0]) << shift for part, shift in zip(parts, (0, 32, 64), strict=True))

    a, b = limbs(x), limbs(y)
    low, carry = execute("add.cc.u32 %r0, %r1, %r2", a[0], b[0])
    middle, carry = execute("addc.cc.u32 %r0, %r1, %r2", a[1], b[1], carry)
    high = execute("addc.u32 %r0, %r1, %r2", a[2], b[2], carry)
    assert joined((low, middle, high)) == (x + y) % 2**96
    low, borrow = execute("sub.cc.u32 %r0, %r1, %r2", a[0], b[0])
    middle, borrow = execute("subc.cc.u32 %r0, %r1, %r2", a[1], b[1], borrow)
    high = execute("subc.u32 %r0, %r1, %r2", a[2], b[2], borrow)
    assert joined((low, middle, high)) == (x - y) % 2**96
    factor = u32(z & 2**32 - 1)
    low, carry = execute("mad.lo.cc.u32 %r0, %r1, %r2, %r3", a[0], factor, b[0])
    middle, carry = execute("madc.hi.cc.u32 %r0, %r1, %r2, %r3", a[0], factor, b[1], carry)
    high = execute("madc.lo.u32 %r0, %r1, 0, %r3", a[0], b[2], carry)
    assert joined((low, middle, high)) == (int(a[0][0]) * int(factor[0]) + y) % 2**96


def test_the_carry_flag_is_an_operand_that_the_engine_sees():
    assert bound("add.cc.u32 %r0, %r1, %r2").destinations[-1] is CARRY
    assert bound("addc.cc.u32 %r0, %r1, %r2").sources[-1] is CARRY
    assert bound("add.u32 %r0, %r1, %r2").destinations == bound("addc.u32 %r0, %r1, %r2").destinations


@pytest.mark.parametrize(("first", "a_type"), [("s32", np.int8), ("u32", np.uint8)])
@pytest.mark.parametrize(("second", "b_type"), [("s32", np.int8), ("u32", np.uint8)])
def test_dp4a_multiplies_bytes_of_either_sign(first, a_type, second, b_type):
    a, b, c = (interesting(32, 96, seed) for seed in range(3))
    products = a.view(a_type).astype(np.int64) * b.view(b_type).astype(np.int64)
    expected = (products.reshape(-1, 4).sum(1) + c.astype(np.int64)) & 0xFFFFFFFF
    got = execute(f"dp4a.{first}.{second} %r0, %r1, %r2, %r3", a, b, c)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("add.wrap.s32 %r0, %r1, %r2", "wrap"),
        ("add.sat.u32 %r0, %r1, %r2", "sat"),
        ("mul.s32 %r0, %r1, %r2", "lo, hi, wide"),
        ("mul.wide.s64 %d0, %d1, %d2", "wide"),
        ("abs.u32 %r0, %r1", "s32"),
        ("frobnicate.b32 %r0, %r1", "frobnicate"),
        ("add.s33 %r0, %r1, %r2", "s33"),
        ("add.s32 %r0, %r1", "operands"),
        ("add.f8 %r0, %r1, %r2", "f8"),
        ("popc.u32 %r0, %r1", "b32"),
        ("ex2.approx.ftz.f64 %d0, %d1", "f64"),
        ("add.rna.f32 %f0, %f1, %f2", "rna"),
        ("shfl.sync.left.b32 %r0, %r1, 0, 31, -1", "up, down, bfly, idx"),
        ("cvt.f32.s32 %f0, %r1", "rn, rz, rm, rp"),
    ],
)
def test_what_is_not_known_is_an_error_that_names_it_and_its_line(line, named):
    with pytest.raises(UnsupportedInstruction) as caught:
        bound(line)
    message = str(caught.value)
    assert named in message
    assert line.split()[0] in message
    assert f"line {caught.value.line}" in message
    assert caught.value.line > 1
