"""Approximate functions of the multi-function unit (PTX "Floating Point Instructions", the .approx forms).

PTX gives bounds, not bits. Here each function is evaluated in float64 and rounded, which is within every
bound; `record` puts another function in its place, such as a table taken from a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from attn4.emulator.isa.registry import (
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
    canonical,
    decode,
    encode,
    flush,
    flush_single,
    round_to,
    to_single,
)
from attn4.emulator.ptx.module import Instruction

_F32: Final = np.dtype(np.float32)
_F64: Final = np.dtype(np.float64)
_U16: Final = np.dtype(np.uint16)

Approximation = Callable[[Array], Array]


def _double(function: Callable[[Array], Array]) -> Approximation:
    return lambda x: function(x.astype(_F64)).astype(_F32)


_TURN: Final = np.float64(np.float32(0.15915494))


def _turned(function: Callable[[Array], Array], x: Array) -> Array:
    """Of an angle that is first made turns, as on an H200: a float32 cut off, then at 25 binary places."""
    turns = to_single(x.astype(_F64) * _TURN, "rz").astype(_F64)
    rest = np.trunc(turns * 2.0**25) * 2.0**-25
    rest -= np.rint(rest)
    result = function(rest * (2 * np.pi)).astype(_F32)
    return np.where(rest == 0, np.copysign(result, x), result) if function is np.sin else result


APPROXIMATIONS: Final[dict[str, Approximation]] = {
    "ex2": _double(np.exp2),
    "lg2": _double(np.log2),
    "rcp": _double(np.reciprocal),
    "sqrt": _double(np.sqrt),
    "rsqrt": _double(lambda x: 1.0 / np.sqrt(x)),
    "sin": lambda x: _turned(np.sin, x),
    "cos": lambda x: _turned(np.cos, x),
    "tanh": _double(np.tanh),
}
"""float32 -> float32, elementwise; subnormals are flushed, and NaN made canonical, by the definitions."""

_DEFAULTS: Final = dict(APPROXIMATIONS)


def is_default(name: str) -> bool:
    """Whether `name` is still the function of this file, and not one put in its place by `record`."""
    return APPROXIMATIONS[name] is _DEFAULTS[name]


def record(name: str, function: Approximation) -> None:
    """Let instructions bound from now on use `function`, float32 -> float32 elementwise, for ex2, lg2, ...

    Raises
    ------
    KeyError
        `name` is not a key of `APPROXIMATIONS`.
    """
    if name not in APPROXIMATIONS:
        raise KeyError(f"no approximation {name}: there are {', '.join(APPROXIMATIONS)}")
    APPROXIMATIONS[name] = function


def approximate(name: str, *, ftz: bool) -> Function:
    """The function `name` on b32 registers that hold float32."""
    function = APPROXIMATIONS[name]
    if not ftz:
        return lambda a: canonical(function(a.view(_F32)))

    def flushed(a: Array) -> Array:
        return canonical(flush_single(function(flush_single(a.view(_F32)))))

    return flushed


def _single(i: Instruction, name: str) -> Function:
    operand_count(i, 2)
    modifiers = Modifiers(i)
    modifiers.one_of("approx")
    ftz = modifiers.flag("ftz")
    modifiers.one_of("f32")
    modifiers.done()
    return approximate(name, ftz=ftz)


def _half(i: Instruction, name: str) -> Function:
    """The function on f16 or bf16, one or a pair: evaluated in float32 and rounded."""
    operand_count(i, 2)
    modifiers = Modifiers(i)
    modifiers.one_of("approx")
    ftz = modifiers.flag("ftz")
    kind = modifiers.one_of("f16", "f16x2", "bf16", "bf16x2")
    modifiers.done()
    element = kind.removesuffix("x2")
    if ftz != (name == "ex2" and element == "bf16"):
        raise UnsupportedInstruction(i, "ftz belongs to ex2 of bf16, and only there")
    function, target = APPROXIMATIONS[name], FORMATS[element]

    def evaluate(a: Array) -> Array:
        x = decode(a.view(_U16), element)
        value = function((flush(x, element) if ftz else x).astype(_F32)).astype(_F64)
        rounded = round_to(value, target, "rn")
        return encode(flush(rounded, element) if ftz else rounded, element).view(a.dtype)

    return evaluate


_BELOW: Final = Spread(-126.0, _F32)


@pure("ex2")
def ex2(i: Instruction) -> Function:
    """Floating-point ex2: d = 2 ** a. PTX's bound: relative error 2^-22; f16 2^-9.9, bf16 2^-7.

    .ftz makes subnormal results +0, which are those of a < -126.
    """
    if "f32" not in i.modifiers:
        return _half(i, "ex2")
    plain = _single(i, "ex2")
    if "ftz" not in i.modifiers:
        return plain
    function = APPROXIMATIONS["ex2"]

    def flushed(a: Array) -> Array:
        x = a.view(_F32)
        result = function(x)
        small = x < _BELOW[len(x)]
        if 1 in small.tobytes():
            result[small] = 0
        return canonical(result)

    return flushed


@pure("lg2")
def lg2(i: Instruction) -> Function:
    """Floating-point lg2: d = log2(a), -inf for zeros, NaN for negative values.

    PTX's bound: absolute error 2^-22 for a in (0.5, 2), elsewhere relative error 2^-22.
    """
    return _single(i, "lg2")


_UPPER: Final = Spread(0xFFFFFFFF00000000, np.uint64)


def upper_half(i: Instruction, function: Callable[[Array], Array]) -> Function:
    """A function of f64 whose argument and result have but their upper 32 bits: 20 of the fraction.

    PTX: "the most-significant 32 bits of operand a ... with the least significant 32 bits of d set to zero".
    """
    operand_count(i, 2)
    modifiers = Modifiers(i)
    modifiers.one_of("approx")
    modifiers.one_of("ftz")
    modifiers.one_of("f64")
    modifiers.done()

    def gross(a: Array) -> Array:
        upper = _UPPER[len(a)]
        x = (a & upper).view(_F64)
        result = flush(function(flush(x, "f64")), "f64")
        bits = np.where(np.isnan(result), np.uint64(0x7FFFFFFF00000000), result.view(np.uint64))
        return bits & upper

    return gross


@pure("rsqrt")
def rsqrt(i: Instruction) -> Function:
    """Floating-point rsqrt: d = 1 / sqrt(a), for zeros infinite with their sign.

    PTX's bound: relative error 2^-22.9; of .ftz.f64 see `upper_half`; .f64 here correctly rounded but for
    two roundings.
    """
    if "f64" not in i.modifiers:
        return _single(i, "rsqrt")
    if "ftz" in i.modifiers:
        return upper_half(i, lambda x: 1.0 / np.sqrt(x))
    operand_count(i, 2)
    modifiers = Modifiers(i)
    modifiers.one_of("approx")
    modifiers.one_of("f64")
    modifiers.done()
    return lambda a: (1.0 / np.sqrt(a.view(_F64))).view(np.uint64)


@pure("sin")
def sin(i: Instruction) -> Function:
    """Floating-point sin. PTX's bound: absolute error 2^-20.5 in [-2pi, 2pi], 2^-14.7 in [-100pi, 100pi]."""
    return _single(i, "sin")


@pure("cos")
def cos(i: Instruction) -> Function:
    """Floating-point cos. PTX's bound: absolute error 2^-20.5 in [-2pi, 2pi], 2^-14.7 in [-100pi, 100pi]."""
    return _single(i, "cos")


@pure("tanh")
def tanh(i: Instruction) -> Function:
    """Floating-point tanh; subnormals stay.

    PTX's bound: relative error 2^-11; absolute error 2^-10.987 for f16, 2^-8 for bf16.
    """
    return _single(i, "tanh") if "f32" in i.modifiers else _half(i, "tanh")
