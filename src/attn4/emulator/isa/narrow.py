"""Conversion to and from numbers of less than 8 bits, and to 8-bit scales (PTX cvt, sm_100), and cvt.pack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from attn4.emulator.isa.integer import lane_type
from attn4.emulator.isa.registry import (
    Array,
    Function,
    Modifiers,
    UnsupportedInstruction,
    operand_count,
)
from attn4.emulator.isa.rounding import Format, encode, round_to
from attn4.emulator.ptx.module import Instruction, Register

if TYPE_CHECKING:
    from attn4.emulator.isa.convert import Form

_F32: Final = np.dtype(np.float32)
_U16: Final = np.dtype(np.uint16)
_U32: Final = np.dtype(np.uint32)

_FORMATS: Final = {
    "e2m1": Format(1, 0, 6.0, 7),
    "e2m3": Format(3, 0, 7.5, 31),
    "e3m2": Format(2, -2, 28.0, 31),
}
"""None of them has infinities or NaN: a NaN becomes the greatest value."""
_BITS: Final = {"e2m1": 4, "e2m3": 6, "e3m2": 6}
SMALL: Final = frozenset({"e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2"})


def small(form: Form) -> Function:
    """Conversion with a pair of such numbers on one side; of two sources a becomes the upper one."""
    if form.sat or form.ftz:
        raise form.refuse("modifiers sat and ftz do not go with it")
    if "ue8m0x2" in (form.source, form.target):
        return _from_scales(form) if form.source == "ue8m0x2" else _to_scales(form)
    if form.rounding != "rn":
        raise form.refuse("rn is needed")
    if form.source in SMALL:
        return _widened(form)
    if form.source != "f32" or not form.satfinite:
        raise form.refuse("the form is cvt.rn.satfinite{.relu} from two f32")
    return _narrowed(form)


def _codes(values: Array, kind: str) -> Array:
    """Bits of float64 values that `kind` holds, or NaN."""
    target = _FORMATS[kind]
    magnitude = np.abs(values)
    _, exponent = np.frexp(magnitude)
    exponent = np.maximum(exponent - 1, target.least)
    units = np.ldexp(magnitude, target.fraction - exponent).astype(np.int64)
    field = np.where(units >> target.fraction > 0, exponent - target.least + 1, 0)
    code = field << target.fraction | units & (1 << target.fraction) - 1
    signed: Array = code | np.signbit(values).astype(np.int64) << _BITS[kind] - 1
    return signed


def _narrowed(form: Form) -> Function:
    operand_count(form.instruction, 3)
    kind = form.target.removesuffix("x2")
    target, relu = _FORMATS[kind], form.relu
    out = _register(form.instruction, 8 if kind == "e2m1" else 16)

    def code(bits: Array) -> Array:
        x = bits.view(_F32).astype(np.float64)
        x = np.where(np.isnan(x), target.greatest, x)
        rounded = round_to(x, target, "rn", finite=True)
        return _codes(np.where(rounded <= 0, 0.0, rounded) if relu else rounded, kind)

    shift = 4 if kind == "e2m1" else 8
    return lambda a, b: (code(a) << shift | code(b)).astype(out)


def _register(i: Instruction, bits: int) -> np.dtype[Any]:
    operand = i.operands[0]
    width = int(operand.type[1:]) if isinstance(operand, Register) else bits
    if width < bits:
        raise UnsupportedInstruction(i, f"register {operand.text} is narrower than {bits} bits")
    return np.dtype(f"u{width // 8}")


def _widened(form: Form) -> Function:
    """To f16x2, exactly."""
    operand_count(form.instruction, 2)
    if form.target != "f16x2" or form.satfinite:
        raise form.refuse("these convert to f16x2")
    kind = form.source.removesuffix("x2")
    bits, target = _BITS[kind], _FORMATS[kind]
    codes = np.arange(1 << bits)
    field, units = (
        codes >> target.fraction & (1 << bits - 1 - target.fraction) - 1,
        codes & (1 << target.fraction) - 1,
    )
    whole = np.where(field > 0, units | 1 << target.fraction, units).astype(np.float64)
    values = np.ldexp(whole, np.maximum(field, 1) - 1 + target.least - target.fraction)
    values = np.where(codes >> bits - 1, -values, values)
    if form.relu:
        values = np.where(values <= 0, 0.0, values)
    table = encode(values, "f16").astype(np.uint32)
    step, mask = (4, 15) if kind == "e2m1" else (8, 63)

    def widen(a: Array) -> Array:
        low, high = a & a.dtype.type(mask), a >> a.dtype.type(step) & a.dtype.type(mask)
        both: Array = table[low] | table[high] << np.uint32(16)
        return both

    return widen


def _to_scales(form: Form) -> Function:
    """ue8m0: powers of two from 2^-127; the sign is not looked at, and NaN is 255."""
    if form.rounding not in ("rz", "rp") or form.relu:
        raise form.refuse("rz or rp is needed")
    up, largest = form.rounding == "rp", 254 if form.satfinite else 255
    out = _register(form.instruction, 16)

    def code(bits: Array) -> Array:
        magnitude = bits & np.uint32(0x7FFFFFFF)
        exponent, fraction = magnitude >> np.uint32(23), magnitude & np.uint32(0x7FFFFF)
        limit = np.where(exponent == 0, np.uint32(0x400000), np.uint32(0))
        chosen = np.minimum(exponent + (fraction > limit) if up else exponent, largest)
        return np.where(magnitude > np.uint32(0x7F800000), 255, chosen).astype(out)

    if form.source == "f32":
        operand_count(form.instruction, 3)
        return lambda a, b: code(a) << out.type(8) | code(b)
    if form.source != "bf16x2":
        raise form.refuse("ue8m0 is made of f32 or bf16x2")
    operand_count(form.instruction, 2)
    upper = np.uint32(0xFFFF0000)
    return lambda a: code(a & upper) << out.type(8) | code(a << np.uint32(16))


def _from_scales(form: Form) -> Function:
    """To bf16x2, exactly: the code is the exponent."""
    operand_count(form.instruction, 2)
    if form.target != "bf16x2" or form.rounding != "rn" or form.relu or form.satfinite:
        raise form.refuse("the form is cvt.rn.bf16x2.ue8m0x2")
    table = (np.arange(256, dtype=np.uint32) << np.uint32(7)).astype(np.uint32)
    table[0], table[255] = 0x0040, 0x7FFF

    def widen(a: Array) -> Array:
        both: Array = table[a & _U16.type(255)] | table[a >> _U16.type(8)] << np.uint32(16)
        return both

    return widen


def packed_integers(i: Instruction) -> Function:
    """cvt.pack.sat: a and b clamped to 16 bits, or to 8 beside the lower half of c; b in the lower place."""
    modifiers = Modifiers(i)
    modifiers.one_of("pack")
    modifiers.one_of("sat")
    kind = modifiers.one_of("u16", "s16", "u8", "s8")
    modifiers.one_of("s32")
    narrow = kind.endswith("8")
    if narrow:
        modifiers.one_of("b32")
    modifiers.done()
    operand_count(i, 4 if narrow else 3)
    limits = np.iinfo(lane_type(kind))
    bits, mask = (8, np.uint32(0xFF)) if narrow else (16, np.uint32(0xFFFF))

    def pack(a: Array, b: Array, *c: Array) -> Array:
        parts = [np.clip(x.view(np.int32), limits.min, limits.max).astype(_U32) & mask for x in (a, b)]
        both = parts[0] << np.uint32(bits) | parts[1]
        return c[0] << np.uint32(16) | both if c else both

    return pack
