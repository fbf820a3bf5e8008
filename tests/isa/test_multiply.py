"""24-bit products, dot products of parts, and extension from any width, against Python's integers."""

import numpy as np
import pytest

from attn4.emulator.isa.registry import UnsupportedInstruction
from isa_lines import bound, execute, u32


def words(count, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**32, count, dtype=np.uint64) >> rng.integers(0, 32, count).astype(np.uint64)
    values[:7] = [0, 0x7FFFFF, 0x800000, 0xFFFFFF, 2**32 - 1, 2**31, 0x7FFFFF if seed < 3 else 2**31 - 1]
    return values.astype(np.uint32)


def low(x, bits, signed):
    x &= (1 << bits) - 1
    return x - (1 << bits) if signed and x >> bits - 1 else x


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_24_bit_products_are_those_of_the_lower_bits(kind, half):
    a, b, c = words(96, 1), words(96, 2), words(96, 3)
    signed = kind == "s32"
    parts = [
        low(x, 24, signed) * low(y, 24, signed) >> (16 if half == "hi" else 0)
        for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    got = execute(f"mul24.{half}.{kind} %r0, %r1, %r2", a, b)
    assert got.tolist() == [part & 2**32 - 1 for part in parts]
    got = execute(f"mad24.{half}.{kind} %r0, %r1, %r2, %r3", a, b, c)
    assert got.tolist() == [part + z & 2**32 - 1 for part, z in zip(parts, c.tolist(), strict=True)]
    if signed and half == "hi":
        got = execute("mad24.hi.sat.s32 %r0, %r1, %r2, %r3", a, b, c)
        totals = [
            low(p & 2**32 - 1, 32, True) + low(z, 32, True) for p, z in zip(parts, c.tolist(), strict=True)
        ]
        assert got.view(np.int32).tolist() == [max(-(2**31), min(2**31 - 1, total)) for total in totals]
        assert max(totals) >= 2**31


@pytest.mark.parametrize("first", ["s32", "u32"])
@pytest.mark.parametrize("second", ["s32", "u32"])
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_dp2a_multiplies_halves_by_two_bytes(first, second, half):
    a, b, c = words(96, 4), words(96, 5), words(96, 6)
    at = 16 if half == "hi" else 0
    expected = [
        z
        + sum(low(x >> 16 * n, 16, first == "s32") * low(y >> at + 8 * n, 8, second == "s32") for n in (0, 1))
        & 2**32 - 1
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    got = execute(f"dp2a.{half}.{first}.{second} %r0, %r1, %r2, %r3", a, b, c)
    assert got.tolist() == [x & 2**32 - 1 for x in expected]


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_szext_extends_from_any_width(kind):
    a = words(40, 7)
    for bits in (0, 1, 7, 24, 31, 32, 33, 64, 2**32 - 1):
        for mode, used in (("clamp", min(bits, 32)), ("wrap", bits % 32)):
            got = execute(f"szext.{mode}.{kind} %r0, %r1, {bits}", a)
            want = [low(x, used, kind == "s32") & 2**32 - 1 if used else 0 for x in a.tolist()]
            assert got.tolist() == want


def test_what_is_no_form_is_refused_by_name():
    for line in (
        "mul24.lo.u64 %d0, %d1, %d2",
        "dp2a.s32.s32 %r0, %r1, %r2, %r3",
        "mad24.lo.sat.s32 %r0, %r1, %r2, %r3",
    ):
        with pytest.raises(UnsupportedInstruction, match=line.split(" ")[0]):
            bound(line)


def test_products_out_of_bounds_are_zero():
    a, b, c = u32(0xFFF73C00, 0x3C003C00), u32(0x3C003C00, 0x3C007FF7), u32(0x40004000, 0x40004000)
    plain = execute("fma.rn.f16x2 %r0, %r1, %r2, %r3", a, b, c)
    assert plain.tolist() == [0x7FFF4200, 0x42007FFF]
    assert execute("fma.rn.oob.f16x2 %r0, %r1, %r2, %r3", a, b, c).tolist() == [0x00004200, 0x42000000]


def test_the_gross_reciprocals_of_doubles_have_20_bits_of_fraction():
    a = np.array([3.0, -0.1, 0.0, -np.inf, np.nan, 2.0**-1074, 1e300])
    bits = a.view(np.uint64)
    got = execute("rcp.approx.ftz.f64 %d0, %d1", bits)
    assert not (got & np.uint64(0xFFFFFFFF)).any()
    np.testing.assert_allclose(got.view(np.float64)[[0, 1, 6]], 1 / a[[0, 1, 6]], rtol=2**-19)
    assert got.view(np.float64)[[2, 3, 5]].tolist() == [np.inf, 0.0, np.inf]
    assert np.isnan(got.view(np.float64)[4])
    got = execute("rsqrt.approx.ftz.f64 %d0, %d1", bits).view(np.float64)
    np.testing.assert_allclose(got[[0, 6]], 1 / np.sqrt(a[[0, 6]]), rtol=2**-19)
