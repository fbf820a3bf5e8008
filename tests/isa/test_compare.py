"""Comparison and selection against Python's comparisons."""

import math
import operator

import numpy as np
import pytest

from attn4.emulator.isa.registry import UnsupportedInstruction
from isa_lines import bits, bound, execute, u32

ORDERED = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
NUMBERS = [0.0, -0.0, 1.0, -1.0, 2.5, math.inf, -math.inf, math.nan]
PAIRS = [(x, y) for x in NUMBERS for y in NUMBERS]
LEFT, RIGHT = (np.array([pair[n] for pair in PAIRS], np.float32) for n in range(2))
FLOATS = {
    "f32": ("%f", lambda x: x.view(np.uint32)),
    "f64": ("%d", lambda x: x.astype(np.float64).view(np.uint64)),
    "f16": ("%h", lambda x: x.astype(np.float16).view(np.uint16)),
    "bf16": ("%h", lambda x: (x.view(np.uint32) >> 16).astype(np.uint16)),
}


@pytest.mark.parametrize("kind", FLOATS)
def test_ordered_comparisons_are_false_with_nan_and_unordered_ones_true(kind):
    register, encode = FLOATS[kind]
    a, b = encode(LEFT), encode(RIGHT)
    unordered = [math.isnan(x) or math.isnan(y) for x, y in PAIRS]
    for name, compare in ORDERED.items():
        plain = [compare(x, y) and not nan for (x, y), nan in zip(PAIRS, unordered, strict=True)]
        assert execute(f"setp.{name}.{kind} %p0, {register}1, {register}2", a, b).tolist() == plain
        either = [x or nan for x, nan in zip(plain, unordered, strict=True)]
        assert execute(f"setp.{name}u.{kind} %p0, {register}1, {register}2", a, b).tolist() == either
    assert execute(f"setp.nan.{kind} %p0, {register}1, {register}2", a, b).tolist() == unordered
    assert execute(f"setp.num.{kind} %p0, {register}1, {register}2", a, b).tolist() == [
        not x for x in unordered
    ]


@pytest.mark.parametrize("width", [16, 32, 64])
def test_integers_compare_by_sign_or_without(width):
    register = {16: "%h", 32: "%r", 64: "%d"}[width]
    values = [0, 1, 2 ** (width - 1) - 1, 2 ** (width - 1), 2**width - 1]
    pairs = [(x, y) for x in values for y in values]
    a, b = (np.array([pair[n] for pair in pairs], f"u{width // 8}") for n in range(2))
    signed = [[x - (1 << width) if x >> width - 1 else x for x in pair] for pair in pairs]
    operands = f"%p0, {register}1, {register}2"
    for name, compare in ORDERED.items():
        assert execute(f"setp.{name}.u{width} {operands}", a, b).tolist() == [
            compare(*pair) for pair in pairs
        ]
        assert execute(f"setp.{name}.s{width} {operands}", a, b).tolist() == [
            compare(*pair) for pair in signed
        ]
    for name, other in {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.items():
        got = execute(f"setp.{name}.u{width} {operands}", a, b)
        np.testing.assert_array_equal(got, execute(f"setp.{other}.u{width} {operands}", a, b))


@pytest.mark.parametrize(
    ("name", "join"), [("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)]
)
def test_the_second_predicate_joins_the_opposite(name, join):
    a, b, c = u32(1, 1, 2, 2), u32(1, 1, 1, 1), np.array([0, 1, 0, 1], bool)
    p, q = execute(f"setp.eq.{name}.s32 %p0|%p1, %r1, %r2, %p2", a, b, c)
    equal = np.array([1, 1, 0, 0], bool)
    np.testing.assert_array_equal(p, join(equal, c))
    np.testing.assert_array_equal(q, join(~equal, c))
    np.testing.assert_array_equal(execute(f"setp.eq.{name}.s32 %p0, %r1, %r2, %p2", a, b, c), join(equal, c))
    p, q = execute("setp.eq.s32 %p0|%p1, %r1, %r2", a, b)
    np.testing.assert_array_equal(q, ~p)


def test_pairs_of_halves_give_two_predicates():
    a = np.array([1, 5, 3, np.nan], np.float16).view(np.uint32)
    b = np.array([2, 4, 3, 1], np.float16).view(np.uint32)
    low, high = execute("setp.lt.f16x2 %p0|%p1, %r1, %r2", a, b)
    assert low.tolist() == [True, False]
    assert high.tolist() == [False, False]


def test_ftz_makes_subnormals_equal_to_zero():
    assert execute("setp.eq.ftz.f32 %p0, %f1, %f2", u32(1), u32(0x80000000)).tolist() == [True]
    assert execute("setp.eq.f32 %p0, %f1, %f2", u32(1), u32(0x80000000)).tolist() == [False]


def test_set_writes_ones_or_one():
    a, b = bits([1.0, 2.0]), bits([2.0, 1.0])
    assert execute("set.lt.u32.f32 %r0, %f1, %f2", a, b).tolist() == [2**32 - 1, 0]
    assert execute("set.lt.f32.f32 %f0, %f1, %f2", a, b).tolist() == [0x3F800000, 0]
    assert execute("set.lt.f32.s32 %f0, %r1, %r2", a, b).tolist() == [0x3F800000, 0]
    p = np.array([0, 1], bool)
    assert execute("set.lt.xor.s32.f32 %r0, %f1, %f2, %p0", a, b, p).tolist() == [2**32 - 1, 2**32 - 1]
    halves = (
        np.array([1, 4, 2, 2], np.float16).view(np.uint32),
        np.array([2, 3, 2, 9], np.float16).view(np.uint32),
    )
    assert execute("set.lt.f16x2.f16x2 %r0, %r1, %r2", *halves).tolist() == [0x00003C00, 0x3C000000]


def test_selection():
    a, b, p = u32(1, 2, 3), u32(4, 5, 6), np.array([1, 0, 1], bool)
    assert execute("selp.b32 %r0, %r1, %r2, %p0", a, b, p).tolist() == [1, 5, 3]
    assert execute("selp.f32 %f0, %f1, 0fFF800000, %p0", a, p).tolist() == [1, 0xFF800000, 3]
    assert execute("selp.b32 %r0, -1, 0, %p0", p).tolist() == [2**32 - 1, 0, 2**32 - 1]
    assert execute("slct.u32.s32 %r0, %r1, %r2, %r3", a, b, u32(0, 2**31, 5)).tolist() == [1, 5, 3]
    assert execute("slct.b32.f32 %r0, %r1, %r2, %f3", a, b, bits([-0.0, np.nan, -1])).tolist() == [1, 5, 6]


@pytest.mark.parametrize(
    "line",
    [
        "setp.lt.b32 %p0, %r1, %r2",
        "setp.ltu.s32 %p0, %r1, %r2",
        "setp.lo.f32 %p0, %f1, %f2",
        "setp.eq.ftz.s32 %p0, %r1, %r2",
        "setp.eq.and.s32 %p0, %r1, %r2",
        "setp.eq.f16x2 %p0, %r1, %r2",
        "selp.pred %p0, %p1, %p2, %p3",
    ],
)
def test_forms_that_do_not_exist_are_errors(line):
    with pytest.raises(UnsupportedInstruction):
        bound(line)
