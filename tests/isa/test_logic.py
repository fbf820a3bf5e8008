"""Logic, shifts and bit fields against Python's integers."""

import numpy as np
import pytest
from numpy.random import default_rng

from isa_lines import execute, u32


def words(count, seed, bits=32):
    rng = default_rng(seed)
    values = rng.integers(0, 2**64, count, dtype=np.uint64) >> rng.integers(0, bits, count).astype(np.uint64)
    values[:4] = [0, 1, 2**bits - 1, 2 ** (bits - 1)]
    return values.astype(f"u{bits // 8}")


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_bitwise_operations(bits):
    register = {16: "%h", 32: "%r", 64: "%d"}[bits]
    a, b = words(64, 1, bits), words(64, 2, bits)
    for name, expected in {"and": a & b, "or": a | b, "xor": a ^ b}.items():
        got = execute(f"{name}.b{bits} {register}0, {register}1, {register}2", a, b)
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(execute(f"not.b{bits} {register}0, {register}1", a), ~a)
    np.testing.assert_array_equal(execute(f"cnot.b{bits} {register}0, {register}1", a), a == 0)


def test_predicates_are_bits_too():
    p, q = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    assert execute("and.pred %p0, %p1, %p2", p, q).tolist() == [0, 0, 0, 1]
    assert execute("or.pred %p0, %p1, %p2", p, q).tolist() == [0, 1, 1, 1]
    assert execute("xor.pred %p0, %p1, %p2", p, q).tolist() == [0, 1, 1, 0]
    assert execute("not.pred %p0, %p1", p).tolist() == [1, 1, 0, 0]
    assert execute("and.pred %p0, %p1, 0", p).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64"])
@pytest.mark.parametrize("constant", [False, True])
def test_shifts_clamp_their_amount_to_the_width(kind, constant):
    bits = int(kind[1:])
    register = {16: "%h", 32: "%r", 64: "%d"}[bits]
    a = words(64, 3, bits)
    amounts = [0, 1, 7, bits - 1, bits, bits + 1, 0x10001, 2**31, 2**32 - 1]
    for amount in amounts:
        operand = str(amount) if constant else "%r2"
        more = [] if constant else [np.full(64, amount, np.uint32)]
        right = execute(f"shr.{kind} {register}0, {register}1, {operand}", a, *more)
        signed = a.view(f"i{bits // 8}").tolist() if kind[0] == "s" else a.tolist()
        assert right.tolist() == [(x >> min(amount, bits)) & (1 << bits) - 1 for x in signed]
        if kind[0] == "b":
            left = execute(f"shl.{kind} {register}0, {register}1, {operand}", a, *more)
            assert left.tolist() == [(x << min(amount, bits)) & (1 << bits) - 1 for x in a.tolist()]


@pytest.mark.parametrize("direction", ["l", "r"])
@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shift(direction, mode):
    a, b = words(80, 4), words(80, 5)
    c = np.tile(u32(0, 1, 31, 32, 33, 63, 64, 100, 2**32 - 1, 16), 8)
    got = execute(f"shf.{direction}.{mode}.b32 %r0, %r1, %r2, %r3", a, b, c)
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        n = min(z, 32) if mode == "clamp" else z & 31
        pair = y << 32 | x
        assert result == ((pair << n) >> 32 if direction == "l" else pair >> n) & 2**32 - 1


def test_lop3_is_its_truth_table():
    a, b, c = u32(0xF0F0F0F0, 0x12345678), u32(0xCCCCCCCC, 0x9ABCDEF0), u32(0xAAAAAAAA, 0x0F1E2D3C)
    for table in range(256):
        got = execute(f"lop3.b32 %r0, %r1, %r2, %r3, {table}", a, b, c)
        for lane in range(2):
            expected = 0
            for bit in range(32):
                index = (
                    (int(a[lane]) >> bit & 1) << 2 | (int(b[lane]) >> bit & 1) << 1 | int(c[lane]) >> bit & 1
                )
                expected |= (table >> index & 1) << bit
            assert got[lane] == expected


def test_lop3_with_a_predicate():
    a, zero, q = u32(1, 0, 1, 0), u32(0, 0, 0, 0), np.array([1, 1, 0, 0], bool)
    result, p = execute("lop3.and.b32 %r0|%p0, %r1, %r2, %r2, 0xF0, %p1", a, zero, zero, q)
    assert result.tolist() == [1, 0, 1, 0]
    assert p.tolist() == [1, 0, 0, 0]
    _, p = execute("lop3.or.b32 _|%p0, %r1, %r2, %r2, 0xF0, %p1", a, zero, zero, q)
    assert p.tolist() == [1, 1, 1, 0]


def permuted(a, b, selector):
    data = (b << 32 | a).to_bytes(8, "little")
    result = 0
    for n in range(4):
        nibble = selector >> 4 * n & 15
        byte = data[nibble & 7]
        if nibble & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << 8 * n
    return result


def test_prmt_picks_bytes_and_spreads_signs():
    a, b, c = words(256, 6), words(256, 7), default_rng(8).integers(0, 65536, 256).astype(np.uint32)
    got = execute("prmt.b32 %r0, %r1, %r2, %r3", a, b, c)
    assert got.tolist() == [permuted(*lane) for lane in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    for selector in (0x5410, 0x7632, 0x7610, 0x5432, 0x1032, 0x3210, 0x0123, 0xFEDC, 0x4444, 0x8888):
        got = execute(f"prmt.b32 %r0, %r1, %r2, {selector}", a, b)
        expected = [permuted(x, y, selector) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert got.tolist() == expected, hex(selector)


def test_prmt_modes_follow_the_tables_of_the_manual():
    # PTX 9.7.9.7: selectors as d.b3 d.b2 d.b1 d.b0 for c[1:0] = 0, 1, 2, 3.
    tables = {
        "f4e": ("3210", "4321", "5432", "6543"),
        "b4e": ("5670", "6701", "7012", "0123"),
        "rc8": ("0000", "1111", "2222", "3333"),
        "ecl": ("3210", "3211", "3222", "3333"),
        "ecr": ("0000", "1110", "2210", "3210"),
        "rc16": ("1010", "3232", "1010", "3232"),
    }
    a, b = u32(0x03020100, 0x03020100, 0x03020100, 0x03020100), u32(*[0x07060504] * 4)
    for mode, table in tables.items():
        got = execute(f"prmt.b32.{mode} %r0, %r1, %r2, %r3", a, b, u32(0, 1, 2, 3))
        assert [f"{x:08x}" for x in got.tolist()] == ["".join(f"0{digit}" for digit in row) for row in table]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(kind):
    bits = int(kind[1:])
    register = {32: "%r", 64: "%d"}[bits]
    a = words(400, 9, bits)
    rng = default_rng(10)
    b, c = (
        rng.choice([0, 1, 3, 8, bits - 1, bits, bits + 1, 255, 256, 300], 400).astype(np.uint32)
        for _ in range(2)
    )
    got = execute(f"bfe.{kind} {register}0, {register}1, %r2, %r3", a, b, c)
    for x, position, length, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        if bits == 32:
            position, length = position & 255, length & 255
        sign = kind[0] == "s" and length > 0 and x >> min(position + length - 1, bits - 1) & 1
        expected = 0
        for n in range(bits):
            inside = n < length and position + n < bits
            expected |= (x >> position + n & 1 if inside else int(sign)) << n
        assert result == expected


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_field_insert(bits):
    register = {32: "%r", 64: "%d"}[bits]
    a, b = words(400, 11, bits), words(400, 12, bits)
    rng = default_rng(13)
    c, d = (
        rng.choice([0, 1, 3, 8, bits - 1, bits, bits + 1, 255, 256, 300], 400).astype(np.uint32)
        for _ in range(2)
    )
    got = execute(f"bfi.b{bits} {register}0, {register}1, {register}2, %r3, %r4", a, b, c, d)
    lanes = zip(a.tolist(), b.tolist(), c.tolist(), d.tolist(), got.tolist(), strict=True)
    for x, y, position, length, result in lanes:
        position, length = position & 255, length & 255
        expected = y
        for n in range(length):
            if position + n < bits:
                expected = expected & ~(1 << position + n) | (x >> n & 1) << position + n
        assert result == expected


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_and_reversing_bits(bits):
    register = {32: "%r", 64: "%d"}[bits]
    a = words(200, 14, bits)
    values = a.tolist()
    assert execute(f"popc.b{bits} %r0, {register}1", a).tolist() == [x.bit_count() for x in values]
    assert execute(f"clz.b{bits} %r0, {register}1", a).tolist() == [bits - x.bit_length() for x in values]
    reversed_ = [int(f"{x:0{bits}b}"[::-1], 2) for x in values]
    assert execute(f"brev.b{bits} {register}0, {register}1", a).tolist() == reversed_
    none = 2**32 - 1
    found = [x.bit_length() - 1 if x else none for x in values]
    assert execute(f"bfind.u{bits} %r0, {register}1", a).tolist() == found
    shift = [none if n == none else bits - 1 - n for n in found]
    assert execute(f"bfind.shiftamt.u{bits} %r0, {register}1", a).tolist() == shift
    magnitude = [x ^ (2**bits - 1) if x >> bits - 1 else x for x in values]
    found = [x.bit_length() - 1 if x else none for x in magnitude]
    assert execute(f"bfind.s{bits} %r0, {register}1", a).tolist() == found


def test_masks_and_nth_set_bit():
    a, b = u32(0, 3, 31, 32, 40), u32(5, 32, 2, 1, 40)
    clamped = [
        ((1 << min(y, 32)) - 1 << min(x, 32)) & 2**32 - 1 for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert execute("bmsk.clamp.b32 %r0, %r1, %r2", a, b).tolist() == clamped
    mask, base, offset = u32(0b101100, 0b101100, 0b101100, 0b101100), u32(0, 2, 4, 5), u32(2, 0, 0, 2**32 - 2)
    assert execute("fns.b32 %r0, %r1, %r2, %r3", mask, base, offset).tolist() == [3, 2, 2**32 - 1, 3]
