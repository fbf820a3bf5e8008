"""Conversion between number types (PTX "Data Movement and Conversion Instructions": cvt).

Integers are extended, cut or clamped; floats go through float64, exactly or rounded to odd, and are rounded
once. A source register may be wider than its type (the low bits count), and so may a destination (sign or
zeros fill it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from attn4.emulator.isa.integer import lane_type
from attn4.emulator.isa.narrow import SMALL, packed_integers, small
from attn4.emulator.isa.registry import (
    WIDTHS,
    Array,
    Function,
    Modifiers,
    Spread,
    UnsupportedInstruction,
    operand_count,
    pure,
)
from attn4.emulator.isa.rounding import (
    FORMATS,
    TO_INTEGRAL,
    canonical,
    decode,
    encode,
    flush,
    narrow,
    odd_sum,
    round_fraction,
    round_to,
)
from attn4.emulator.ptx.module import Instruction, Register

_F32: Final = np.dtype(np.float32)
_F64: Final = np.dtype(np.float64)
_U16: Final = np.dtype(np.uint16)
_U32: Final = np.dtype(np.uint32)
_INTEGERS: Final = frozenset(f"{kind}{bits}" for kind in "su" for bits in (8, 16, 32, 64))
_REALS: Final = frozenset({"f16", "bf16", "f32", "f64"})
_EIGHT: Final = ("e4m3x2", "e5m2x2")
_TO_INTEGER: Final = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
_TO_REAL: Final = ("rn", "rz", "rm", "rp", "rna")


@dataclass(frozen=True, slots=True)
class Form:
    """One cvt: types, rounding ("" if none is stated), and what is done to the result."""

    instruction: Instruction
    target: str
    source: str
    rounding: str
    ftz: bool
    sat: bool
    satfinite: bool
    relu: bool

    def refuse(self, reason: str) -> UnsupportedInstruction:
        """The error that names this conversion."""
        return UnsupportedInstruction(self.instruction, reason)


def _form(i: Instruction) -> Form:
    types = [modifier for modifier in i.modifiers if modifier in WIDTHS]
    rest = tuple(modifier for modifier in i.modifiers if modifier not in WIDTHS)
    if len(types) != 2:
        raise UnsupportedInstruction(i, "two types are needed: of the result, and of the source")
    modifiers = Modifiers(i, rest)
    rounding = modifiers.one_of(*_TO_INTEGER, *_TO_REAL, default="none").replace("none", "")
    flags = [modifiers.flag(name) for name in ("ftz", "sat", "satfinite", "relu")]
    modifiers.done()
    return Form(i, types[0], types[1], rounding, *flags)


@pure("cvt")
def cvt(i: Instruction) -> Function:
    """Conversion cvt: d = a as another type.

    To an integer: rounded to integral as .rni, .rzi, .rmi or .rpi say, then clamped to the type's range; NaN
    gives 0, or the top bit alone where f64, s64 or u64 takes part. To a float: one rounding. .sat clamps to
    [0, 1] or to the integer's range, .satfinite to the largest finite value, .relu makes negative values +0.
    Of two sources a becomes the upper half.
    """
    if "pack" in i.modifiers:
        return packed_integers(i)
    form = _form(i)
    if form.target in SMALL or form.source in SMALL:
        return small(form)
    if form.target in _EIGHT or form.source in _EIGHT:
        return _eight_bits(form)
    if form.target in ("f16x2", "bf16x2"):
        return _pair(form)
    operand_count(i, 2)
    if form.target == "tf32":
        return _tf32(form)
    known = _INTEGERS | _REALS
    if not {form.target, form.source} <= known:
        raise form.refuse(f"conversion from {form.source} to {form.target}")
    read = _reader(i, form.source)
    write = _writer(i, form.target)
    if form.source in _INTEGERS:
        convert = _from_integer(form)
    elif form.target in _INTEGERS:
        convert = _real_to_integer(form)
    else:
        convert = _real_to_real(form)
    return lambda a: write(convert(read(a)))


def _reader(i: Instruction, kind: str) -> Callable[[Array], Array]:
    """The source, of type `kind`, from a register that may be wider: integers typed, floats as bits."""
    operand = i.operands[1]
    bits = WIDTHS[kind]
    inside = lane_type(kind) if kind in _INTEGERS else np.dtype(f"u{bits // 8}")
    width = int(operand.type[1:]) if isinstance(operand, Register) else bits
    if width < bits:
        raise UnsupportedInstruction(i, f"register {operand.text} is narrower than {kind}")
    if width == bits:
        return lambda a: a.view(inside)
    return lambda a: a.astype(inside)


def _writer(i: Instruction, kind: str) -> Callable[[Array], Array]:
    """A value of type `kind` as the destination register holds it."""
    operand = i.operands[0]
    bits = WIDTHS[kind]
    width = int(operand.type[1:]) if isinstance(operand, Register) else max(bits, 16)
    if width < bits:
        raise UnsupportedInstruction(i, f"register {operand.text} is narrower than {kind}")
    register: np.dtype[Any] = np.dtype(f"u{width // 8}")
    if width == bits:
        return lambda a: a.view(register)
    wide: np.dtype[Any] = np.dtype(f"i{width // 8}")
    return lambda a: a.astype(wide).view(register)


def _from_integer(form: Form) -> Callable[[Array], Array]:
    if form.ftz or form.satfinite or form.relu:
        raise form.refuse("modifiers ftz, satfinite and relu do not go with integers")
    if form.target in _REALS:
        return _integer_to_real(form)
    if form.rounding:
        raise form.refuse("no rounding takes place between integers")
    inside = lane_type(form.target)
    if not form.sat:
        return lambda a: a.astype(inside)
    source, target = np.iinfo(lane_type(form.source)), np.iinfo(inside)
    low, high = max(source.min, target.min), min(source.max, target.max)
    return lambda a: np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(inside)


def _integer_to_real(form: Form) -> Callable[[Array], Array]:
    if form.rounding not in ("rn", "rz", "rm", "rp") or form.sat:
        raise form.refuse("one of rn, rz, rm, rp is needed, and sat does not go with it")
    wide = WIDTHS[form.source] == 64
    target, mode = form.target, form.rounding
    if mode == "rn" and target in ("f32", "f64"):
        inside = _F32 if target == "f32" else _F64
        return lambda a: a.astype(inside)
    if target == "f64":
        if not wide:
            return lambda a: a.astype(_F64)
        return lambda a: np.array([round_fraction(Fraction(x), mode) if x else 0.0 for x in a.tolist()])
    if not wide:
        return lambda a: narrow(a.astype(_F64), target, mode)

    def from_wide(a: Array) -> Array:
        low = (a & a.dtype.type(0xFFFFFFFF)).astype(_F64)
        return narrow(odd_sum((a >> a.dtype.type(32)).astype(_F64) * 2.0**32, low), target, mode)

    return from_wide


def _real_to_integer(form: Form) -> Callable[[Array], Array]:
    if form.rounding not in _TO_INTEGER or form.satfinite or form.relu:
        raise form.refuse("one of rni, rzi, rmi, rpi is needed, and satfinite and relu do not go with it")
    round_it = TO_INTEGRAL[_TO_INTEGER[form.rounding]]
    inside = lane_type(form.target)
    limits = np.iinfo(inside)
    source, ftz = form.source, form.ftz
    nan = 0
    if form.source == "f64" or WIDTHS[form.target] == 64:
        nan = limits.min if inside.kind == "i" else 1 << WIDTHS[form.target] - 1

    def convert(a: Array) -> Array:
        x = decode(a, source)
        x = round_it(flush(x, source) if ftz else x)
        above, below = x >= float(limits.max), x <= float(limits.min)
        wrong = above | below | np.isnan(x)
        if 1 not in wrong.tobytes():
            return x.astype(inside)
        result = np.where(wrong, 0.0, x).astype(inside)
        result[above], result[below], result[np.isnan(x)] = limits.max, limits.min, nan
        return result

    return convert


def _finished(form: Form) -> Callable[[Array], Array]:
    """.sat and .relu on rounded values."""
    if form.sat:
        return lambda x: np.minimum(np.where(x > 0, x, 0.0), 1.0)
    if form.relu:
        return lambda x: np.where(x <= 0, 0.0, x)
    return lambda x: x


def _real_to_real(form: Form) -> Callable[[Array], Array]:
    source, target, mode = form.source, form.target, form.rounding
    exact = (
        FORMATS[target].fraction >= FORMATS[source].fraction
        and FORMATS[target].least <= FORMATS[source].least
    )
    if mode in _TO_INTEGER and source != target:
        raise form.refuse("rounding to integral needs one type on both sides")
    if (not mode and not exact) or mode == "rna":
        raise form.refuse("one of rn, rz, rm, rp is needed")
    if form.ftz and "f32" not in (source, target):
        raise form.refuse("modifier ftz needs f32 on one side")
    if (form.relu or form.satfinite) and (target not in ("f16", "bf16") or source != "f32"):
        raise form.refuse("modifiers relu and satfinite are for f16 and bf16 from f32")
    finish, clamp = _finished(form), form.satfinite
    integral = TO_INTEGRAL[_TO_INTEGER[mode]] if mode in _TO_INTEGER else None
    # An H200 does not flush the sources of a conversion to f16 or bf16.
    flush_source = form.ftz and source == "f32" and target not in ("f16", "bf16")
    flush_target = form.ftz and target == "f32"
    if (source, target) == ("bf16", "f32") and not (form.sat or form.ftz):
        # NaN included: an H200 shifts the bits.
        return lambda a: a.astype(_U32) << np.uint32(16)

    def convert(a: Array) -> Array:
        x = decode(a, source)
        if flush_source:
            x = flush(x, source)
        if integral:
            x = integral(x)
        elif not exact:
            x = round_to(x, FORMATS[target], mode, finite=clamp)
        if flush_target:
            x = flush(x, target)
        return encode(finish(x), target)

    return _keeping_nan(convert) if (source, target) == ("f64", "f32") and not form.sat else convert


def _keeping_nan(convert: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """From f64 to f32: the upper bits of a NaN stay, and it is made quiet, as on an H200."""

    def convert_all(a: Array) -> Array:
        result = convert(a)
        nan = np.isnan(a.view(_F64))
        if 1 in nan.tobytes():
            kept = (a >> np.uint64(32)).astype(_U32) & np.uint32(0x80000000)
            kept |= (a >> np.uint64(29)).astype(_U32) & np.uint32(0x007FFFFF) | np.uint32(0x7FC00000)
            result = np.where(nan, kept, result)
        return result

    return convert_all


def _tf32(form: Form) -> Function:
    """To tf32, whose value stands in the upper 19 bits of a register."""
    if form.source != "f32" or form.rounding not in ("rna", "rn", "rz") or form.sat or form.ftz:
        raise form.refuse("the form is cvt.rna, .rn or .rz{.satfinite}{.relu}.tf32.f32")
    finish, mode, clamp = _finished(form), form.rounding, form.satfinite
    if mode == "rna" and not form.relu:
        return lambda a: _away_to_tf32(a, clamp)

    def convert(a: Array) -> Array:
        return encode(finish(round_to(decode(a, "f32"), FORMATS["tf32"], mode, finite=clamp)), "tf32")

    return convert


def _away_to_tf32(a: Array, clamp: bool) -> Array:
    """Ties away from zero, on the bits, and what an H200 does with NaN: its upper bits stay; .satfinite takes
    one off the last place of whatever is not finite.
    """
    finite = (a & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    result = np.where(finite, a + np.uint32(0x1000), a) & np.uint32(0xFFFFE000)
    if clamp:
        over = (result & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
        result = np.where(over, result - np.uint32(0x2000), result)
    return result


def interleave(a: Array, b: Array) -> Array:
    """Elements of b and a in turn: those of b become the lower halves."""
    both = np.empty(len(a) * 2, a.dtype)
    both[0::2] = b
    both[1::2] = a
    return both


_ONE: Final = Spread(1, _U32)
_SIXTEEN: Final = Spread(16, _U32)
_ALMOST_HALF: Final = Spread(0x7FFF, _U32)


def nearest_bf16x2(a: Array, b: Array) -> Array:
    """What cvt.rn.bf16x2.f32 gives: half of the last place is added, less one where that bit is even."""
    both = interleave(a, b)
    values = both.view(_F32)
    norm = values.dot(values)
    if norm != norm:
        # Adding to these bits could carry a NaN into the sign; with its low half clear it stays what it is.
        both = canonical(values)
        both[np.isnan(both.view(_F32))] = 0x7FFF0000
    count = len(both)
    last = both >> _SIXTEEN[count]
    last &= _ONE[count]
    last += _ALMOST_HALF[count]
    last += both
    return last.view(_U16)[1::2].copy().view(_U32)


def _pair(form: Form) -> Function:
    """To f16x2 or bf16x2 of two float32."""
    operand_count(form.instruction, 3)
    if form.source != "f32" or form.rounding not in ("rn", "rz") or form.sat or form.ftz:
        raise form.refuse("the form is cvt.rn or .rz{.relu}{.satfinite} from two f32")
    element = form.target.removesuffix("x2")
    if form.target == "bf16x2" and form.rounding == "rn" and not (form.relu or form.satfinite):
        return nearest_bf16x2
    finish, mode, clamp = _finished(form), form.rounding, form.satfinite
    target = FORMATS[element]
    if element == "f16" and mode == "rn" and not (form.relu or clamp):
        return lambda a, b: encode(interleave(a, b).view(_F32), "f16").view(_U32)

    def convert(a: Array, b: Array) -> Array:
        x = decode(interleave(a, b), "f32")
        return encode(finish(round_to(x, target, mode, finite=clamp)), element).view(_U32)

    return convert


def _table(element: str) -> Array:
    """float16 bits of the 256 values of an 8-bit format."""
    codes = np.arange(256, dtype=np.uint16)
    if element == "e5m2":
        bits = codes << np.uint16(8)
    else:
        half = (codes & np.uint16(0x80)) << np.uint16(8) | (codes & np.uint16(0x7F)) << np.uint16(7)
        bits = encode(np.ldexp(decode(half, "f16"), 8), "f16")
        bits[codes & 0x7F == 0x7F] = 0x7FFF
    return np.where(np.isnan(bits.view(np.float16)), np.uint16(0x7FFF), bits)


def _eight_bits(form: Form) -> Function:
    """Between pairs of 8-bit floats and f16x2, or from two f32."""
    i = form.instruction
    if form.rounding != "rn" or form.sat or form.ftz:
        raise form.refuse("8-bit formats take rn, satfinite and relu")
    finish = _finished(form)
    if form.source in _EIGHT:
        operand_count(i, 2)
        if form.target != "f16x2" or form.satfinite:
            raise form.refuse("8-bit formats convert to f16x2")
        table = _table(form.source.removesuffix("x2"))
        if form.relu:
            table = encode(finish(decode(table, "f16")), "f16")
        return lambda a: table[a.view(np.uint8)].view(_U32)
    if not form.satfinite or form.source not in ("f32", "f16x2"):
        raise form.refuse("to 8-bit formats from f32 or f16x2, and satfinite is needed")
    element = form.target.removesuffix("x2")
    target = FORMATS[element]

    def shrink(x: Array) -> Array:
        return encode(finish(round_to(x, target, "rn", finite=True)), element).view(_U16)

    if form.source == "f32":
        operand_count(i, 3)
        return lambda a, b: shrink(decode(interleave(a, b), "f32"))
    operand_count(i, 2)
    return lambda a: shrink(decode(a.view(_U16), "f16"))
