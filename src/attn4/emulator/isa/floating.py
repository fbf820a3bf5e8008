"""Floating-point arithmetic (PTX "Floating Point", "Half Precision", "Mixed Precision Floating Point").

Rounding is to nearest even unless .rz, .rm or .rp say otherwise; subnormals are kept unless .ftz. float32,
float16 and bfloat16 results that are NaN have the canonical bits 0x7fffffff and 0x7fff. PTX lets its compiler
fuse a mul and an add that state no rounding; here they round twice, as written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from attn4.emulator.isa import rounding
from attn4.emulator.isa.registry import (
    FLOATING,
    Array,
    Function,
    Modifiers,
    UnsupportedInstruction,
    operand_count,
    pure,
    value_type,
)
from attn4.emulator.isa.rounding import (
    FORMATS,
    canonical,
    decode,
    directed_sum,
    encode,
    flush,
    flush_single,
    fused_single,
    odd_sum,
    round_to,
    signed_zero,
    to_single,
)
from attn4.emulator.isa.special import approximate, upper_half
from attn4.emulator.ptx.module import Instruction

_F32: Final = np.dtype(np.float32)
_F64: Final = np.dtype(np.float64)
_U16: Final = np.dtype(np.uint16)
_U32: Final = np.dtype(np.uint32)
_U64: Final = np.dtype(np.uint64)
_MODES: Final = ("rn", "rz", "rm", "rp")
_KINDS: Final = tuple(sorted(FLOATING))

Core = Callable[..., Array]

_NEAREST: Final[dict[str, Core]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": fused_single,
}
"""float32 operations, rounded to nearest even."""


def _product_sum(a: Array, b: Array, c: Array) -> Array:
    return odd_sum(a * b, c)


_ODD: Final[dict[str, Core]] = {
    "add": odd_sum,
    "sub": lambda a, b: odd_sum(a, -b),
    "mul": np.multiply,
    "fma": _product_sum,
}
"""The same on float64 values of a narrower type: exact, or rounded to odd."""


def _double(mode: str) -> dict[str, Core]:
    fused = rounding.fused_double(mode)

    def product(a: float, b: float) -> float:
        return fused(a, b, float(np.copysign(0.0, np.copysign(1.0, a) * np.copysign(1.0, b))))

    lanewise = rounding.lanewise
    return {
        "add": np.add if mode == "rn" else lanewise(lambda a, b: fused(a, 1.0, b)),
        "sub": np.subtract if mode == "rn" else lanewise(lambda a, b: fused(a, 1.0, -b) if b == b else b),
        "mul": np.multiply if mode == "rn" else lanewise(product),
        "fma": lanewise(fused),
    }


def _directed(name: str, mode: str) -> Core:
    """A float32 operation in a rounding mode other than to nearest."""
    function = _ODD[name]
    if name in ("add", "sub"):
        add = directed_sum(mode)

        def total(a: Array, b: Array) -> Array:
            b = -b if name == "sub" else b
            return signed_zero(add(a, b), a, b) if mode == "rm" else add(a, b)

        return total

    def compute(*sources: Array) -> Array:
        wide = [source.astype(_F64) for source in sources]
        exact = function(*wide)
        if mode == "rm" and name == "fma":
            exact = signed_zero(exact, wide[0] * wide[1], wide[2])
        return to_single(exact, mode)

    return compute


def _clamp(x: Array) -> Array:
    """.sat: into [0, 1], NaN to +0."""
    clamped: Array = np.minimum(np.where(x > 0, x, x.dtype.type(0)), x.dtype.type(1))
    return clamped


def _relu(x: Array) -> Array:
    """.relu: negative values to +0; NaN stays."""
    return np.where(x <= 0, x.dtype.type(0), x)


def single(core: Core, kind: str, *, count: int = 0, ftz: bool = False, sat: bool = False) -> Function:
    """`core` of `count` float32 arrays (0: of any number), on registers that hold one or two floats each."""
    register = _U64 if kind == "f32x2" else _U32
    if not (ftz or sat):

        def two(a: Array, b: Array) -> Array:
            result = core(a.view(_F32), b.view(_F32))
            norm = result.dot(result)
            return result.view(register) if norm == norm else canonical(result).view(register)

        def plain(*sources: Array) -> Array:
            result = core(*[source.view(_F32) for source in sources])
            norm = result.dot(result)
            return result.view(register) if norm == norm else canonical(result).view(register)

        def three(a: Array, b: Array, c: Array) -> Array:
            result = core(a.view(_F32), b.view(_F32), c.view(_F32))
            norm = result.dot(result)
            return result.view(register) if norm == norm else canonical(result).view(register)

        by_count: dict[int, Function] = {2: two, 3: three}
        return by_count.get(count, plain)

    def modified(*sources: Array) -> Array:
        values = [source.view(_F32) for source in sources]
        result = flush_single(core(*map(flush_single, values))) if ftz else core(*values)
        return canonical(_clamp(result) if sat else result).view(register)

    return modified


def half(core: Core, kind: str, *, ftz: bool, sat: bool, relu: bool) -> Function:
    """`core` of float64 arrays, exact or rounded to odd, on registers that hold f16 or bf16."""
    element = kind.removesuffix("x2")
    target = FORMATS[element]

    def compute(*sources: Array) -> Array:
        values = [decode(source.view(_U16), element) for source in sources]
        if ftz:
            values = [flush(value, element) for value in values]
        result = round_to(core(*values), target, "rn")
        if ftz:
            result = flush(result, element)
        if sat:
            result = _clamp(result)
        if relu:
            result = _relu(result)
        return encode(result, element).view(sources[0].dtype)

    return compute


def _arithmetic(i: Instruction, name: str, operands: int) -> Function:
    modifiers = Modifiers(i)
    operand_count(i, operands)
    if "f32" in i.modifiers and value_type(i) in ("f16", "bf16"):
        return _mixed(i, name)
    kind = modifiers.one_of(*_KINDS)
    mode = modifiers.one_of(*_MODES, default="rn" if name != "fma" else None)
    ftz, sat = modifiers.flag("ftz"), modifiers.flag("sat")
    if kind == "f64":
        modifiers.done()
        if ftz or sat:
            raise UnsupportedInstruction(i, "modifiers ftz and sat do not go with f64")
        function = _double(mode)[name]
        return lambda *sources: function(*[source.view(_F64) for source in sources]).view(_U64)
    if kind in ("f32", "f32x2"):
        modifiers.done()
        if sat and kind == "f32x2":
            raise UnsupportedInstruction(i, "modifier sat does not go with f32x2")
        core = _NEAREST[name] if mode == "rn" else _directed(name, mode)
        return single(core, kind, count=operands - 1, ftz=ftz, sat=sat)
    relu = name == "fma" and modifiers.flag("relu")
    outside = name == "fma" and modifiers.flag("oob")
    modifiers.done()
    if mode != "rn" or ((kind.startswith("bf16") or outside) and (ftz or sat)):
        raise UnsupportedInstruction(i, f"modifiers {mode}, ftz, sat: not all go with {kind}")
    function = half(_ODD[name], kind, ftz=ftz, sat=sat, relu=relu)
    return _outside_is_zero(function) if outside else function


def _outside_is_zero(function: Function) -> Function:
    """.oob: the result is +0 where a or b is the NaN that fills what a copy found out of bounds.

    PTX does not say which NaN: on an H200 it is 0x7ff7, of either sign, for f16 and bf16.
    """
    rest, mark = np.uint16(0x7FFF), np.uint16(0x7FF7)

    def compute(a: Array, b: Array, c: Array) -> Array:
        result = function(a, b, c).view(_U16)
        outside = ((a.view(_U16) & rest) == mark) | ((b.view(_U16) & rest) == mark)
        return np.where(outside, np.uint16(0), result).view(a.dtype)

    return compute


def _mixed(i: Instruction, name: str) -> Function:
    """f16 or bf16 sources, made float32 exactly, with a float32 addend and result."""
    modifiers = Modifiers(i)
    modifiers.one_of("f32")
    kind = modifiers.one_of("f16", "bf16")
    mode = modifiers.one_of(*_MODES, default="rn" if name != "fma" else None)
    sat = modifiers.flag("sat")
    modifiers.done()
    if name == "mul":
        raise UnsupportedInstruction(i, "there is no mul of mixed precision")
    function = single(_NEAREST[name] if mode == "rn" else _directed(name, mode), "f32", sat=sat)

    def compute(*sources: Array) -> Array:
        narrow = [decode(source, kind).astype(_F32).view(_U32) for source in sources[:-1]]
        return function(*narrow, sources[-1])  # type: ignore[no-any-return]

    return compute


def _addend_is_single(i: Instruction) -> tuple[str, ...]:
    kind = value_type(i)
    last = "f32" if "f32" in i.modifiers else kind
    return (kind, kind, last) if i.opcode in ("fma", "mad") else (kind, last)


@pure("add", kinds=FLOATING, types=_addend_is_single)
def add(i: Instruction) -> Function:
    """Floating-point add: d = a + b, rounded once; .sat clamps to [0, 1], NaN to +0."""
    return _arithmetic(i, "add", 3)


@pure("sub", kinds=FLOATING, types=_addend_is_single)
def sub(i: Instruction) -> Function:
    """Floating-point sub: d = a - b, rounded once; .sat as in add."""
    return _arithmetic(i, "sub", 3)


@pure("mul", kinds=FLOATING)
def mul(i: Instruction) -> Function:
    """Floating-point mul: d = a * b, rounded once; .sat as in add."""
    return _arithmetic(i, "mul", 3)


@pure("fma", types=_addend_is_single)
def fma(i: Instruction) -> Function:
    """Floating-point fma: d = a * b + c with no loss of precision in between."""
    return _arithmetic(i, "fma", 4)


@pure("mad", kinds=FLOATING)
def mad(i: Instruction) -> Function:
    """Floating-point mad: from sm_20 on the same as fma; a rounding is required."""
    return _arithmetic(i, "fma", 4)


def _correct(
    i: Instruction, function: Callable[..., Array], by_lane: Callable[[str], Callable[..., float]]
) -> Function:
    """Correctly rounded quotient or root.

    For float32 the float64 result cannot fall on, or cross, a float32 or a tie between two: that takes
    2 * 24 + 2 bits, so its rounding is that of the exact result.
    """
    modifiers = Modifiers(i)
    kind = modifiers.one_of("f32", "f64")
    mode = modifiers.one_of(*_MODES)
    ftz = modifiers.flag("ftz")
    modifiers.done()
    if kind == "f32" and ftz and i.opcode == "rcp":
        # An H200 flushes the exact reciprocal, before it is rounded.
        return single(lambda x: to_single(flush(function(x.astype(_F64)), "f32"), mode), "f32", ftz=True)
    if kind == "f32":
        return single(lambda *x: to_single(function(*[v.astype(_F64) for v in x]), mode), "f32", ftz=ftz)
    if ftz:
        raise UnsupportedInstruction(i, "modifier ftz does not go with f64")
    double = function if mode == "rn" else rounding.lanewise(by_lane(mode))
    return lambda *sources: double(*[source.view(_F64) for source in sources]).view(_U64)


_HUGE: Final = np.float32(2.0**126)


@pure("div", kinds=FLOATING)
def div(i: Instruction) -> Function:
    """Floating-point div: d = a / b. PTX's bound for .full and .approx: 2 ulp; here correctly rounded.

    .approx: for 2^126 < |b| < 2^128 the result is NaN if a is infinite, otherwise 0.
    """
    operand_count(i, 3)
    if not {"approx", "full"} & {*i.modifiers}:
        return _correct(i, np.divide, rounding.divided_double)
    modifiers = Modifiers(i)
    full = modifiers.one_of("approx", "full") == "full"
    modifiers.one_of("f32")
    ftz = modifiers.flag("ftz")
    modifiers.done()

    def approximate_quotient(a: Array, b: Array) -> Array:
        huge = (np.abs(b) > _HUGE) & np.isfinite(b)
        return np.where(huge, a * np.copysign(np.float32(0), b), a / b)

    return single(np.divide if full else approximate_quotient, "f32", ftz=ftz)


def _reciprocal(x: Array) -> Array:
    return 1.0 / x


@pure("rcp")
def rcp(i: Instruction) -> Function:
    """Floating-point rcp: d = 1 / a. PTX's bound for .approx: 1 ulp; of .approx.ftz.f64 see `upper_half`."""
    operand_count(i, 2)
    if "approx" in i.modifiers:
        return upper_half(i, _reciprocal) if "f64" in i.modifiers else _approximation(i, "rcp")

    def by_lane(mode: str) -> Callable[..., float]:
        divide = rounding.divided_double(mode)
        return lambda a: divide(1.0, a)

    return _correct(i, _reciprocal, by_lane)


@pure("sqrt")
def sqrt(i: Instruction) -> Function:
    """Floating-point sqrt: d = sqrt(a), -0 for -0, NaN below 0.

    PTX's bound for .approx: relative error 2^-23.
    """
    operand_count(i, 2)
    return (
        _approximation(i, "sqrt") if "approx" in i.modifiers else _correct(i, np.sqrt, rounding.root_double)
    )


def _approximation(i: Instruction, name: str) -> Function:
    modifiers = Modifiers(i)
    modifiers.one_of("approx")
    ftz = modifiers.flag("ftz")
    modifiers.one_of("f32")
    modifiers.done()
    return approximate(name, ftz=ftz)
