"""Scalar arithmetic that the DSL does not spell: packed conversion and 2^x on the FMA units."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

EXP2_COEFFICIENTS = (1.0, 0.695146143436, 0.227564394474, 0.077119089663)
"""Degree 3, least relative error on [0, 1): 8.8e-5 (FlashAttention-4, arXiv 2603.05451)."""

ROUND_TO_INTEGER = 12582912.0
"""2^23 + 2^22: adding it rounds a small float32 to an integer, held in the low mantissa bits."""


def pack(low, high, dtype):
    """Two float32 rounded to nearest even, as one register of two 16-bit floats."""
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Int32],
        read_only_args=[low, high],
    )


def unpack(word, dtype):
    """The two 16-bit floats of a register as float32, the low one first."""
    if dtype is BFloat16:
        code = (
            "{ .reg .b32 a, b; shl.b32 a, {$r0}, 16; and.b32 b, {$r0}, 0xffff0000; "
            "mov.b32 {$w0}, a; mov.b32 {$w1}, b; }"
        )
    else:
        code = "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }"
    return cute.arch.inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[word])


def multiply_bfloat16(a, b):
    """The products of two registers of two bfloat16 each, rounded to nearest even."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b]
    )


def exp2_fma(x):
    """2^x on the FMA units: Cody-Waite reduction, a cubic, the exponent inserted by an integer add.

    Inputs below -127 give 2^-127; relative error as of ``EXP2_COEFFICIENTS``.
    """
    clamped = cute.arch.fmax(x, Float32(-127.0))
    shifted = cute.arch.inline_ptx(
        "add.rm.ftz.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[clamped, Float32(ROUND_TO_INTEGER)],
    )
    fraction = clamped - (shifted - ROUND_TO_INTEGER)
    power = Float32(EXP2_COEFFICIENTS[-1])
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        power = power * fraction + coefficient
    return scale_by_power(power, shifted)


def exp2_fma_pair(x):
    """`exp2_fma` of two values at once, in packed instructions."""
    clamped = tuple(cute.arch.fmax(value, Float32(-127.0)) for value in x)
    rounder = (Float32(ROUND_TO_INTEGER),) * 2
    shifted = cute.arch.add_packed_f32x2(clamped, rounder, rnd="rm", ftz=True)
    floor = cute.arch.sub_packed_f32x2(shifted, rounder, ftz=True)
    fraction = cute.arch.sub_packed_f32x2(clamped, floor, ftz=True)
    power = (Float32(EXP2_COEFFICIENTS[-1]),) * 2
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        power = cute.arch.fma_packed_f32x2(power, fraction, (Float32(coefficient),) * 2, ftz=True)
    return tuple(scale_by_power(value, exponent) for value, exponent in zip(power, shifted, strict=True))


def scale_by_power(value, shifted):
    """``value`` times 2^n, n in the low mantissa bits of ``shifted``: an integer add, which no FMA unit
    does.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 e, p; mov.b32 e, {$r0}; shl.b32 e, e, 23; mov.b32 p, {$r1}; "
        "add.s32 p, p, e; mov.b32 {$w0}, p; }",
        write_only_types=[Float32],
        read_only_args=[shifted, value],
    )


def zero_of(value):
    """0, computed from a ``value`` that is not negative in a way that no compiler sees through."""
    return cute.arch.inline_ptx(
        "shr.s32 {$w0}, {$r0}, 31;", write_only_types=[Int32], read_only_args=[Int32(value)]
    )


def zero_of_all(words):
    """`zero_of` pairs of 16-bit floats that are not negative: what it is added to comes after all of them."""
    either = words[0]
    for word in words[1:]:
        either = either | word
    return zero_of(either)


def kept(word):
    """``word``, not negative, in a register: no compiler finds it cheaper to compute it again where it is
    used.
    """
    return word + zero_of(word)


def bits_from(first):
    """A word whose bits from ``first`` on are set: all of them if it is negative, none from 32 on."""
    return cute.arch.inline_ptx(
        "{ .reg .s32 n; max.s32 n, {$r0}, 0; shl.b32 {$w0}, -1, n; }",
        write_only_types=[Int32],
        read_only_args=[first],
    )


def signed_word(bits: int) -> int:
    """A word of 32 bits as the signed integer that it is."""
    return bits - (1 << 32) if bits >> 31 else bits


@cute.jit
def reduce_columns(values, function: cutlass.Constexpr, start):
    """Fold a row of registers with ``function`` in two chains, so that latencies overlap."""
    chains = [start, values[0]]
    for i in cutlass.range_constexpr(1, cute.size(values)):
        chains[i % 2] = function(chains[i % 2], values[i])
    return function(chains[0], chains[1])
