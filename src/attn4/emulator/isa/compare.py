"""Comparison and selection (PTX "Comparison and Selection", "Half Precision Comparison Instructions")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from attn4.emulator.isa.integer import lane_type, register_type
from attn4.emulator.isa.registry import (
    WIDTHS,
    Array,
    Function,
    Modifiers,
    UnsupportedInstruction,
    operand_count,
    pure,
    value_type,
)
from attn4.emulator.isa.rounding import flush_single
from attn4.emulator.ptx.module import Instruction, PairDestination

_F32: Final = np.dtype(np.float32)
_F64: Final = np.dtype(np.float64)
_U16: Final = np.dtype(np.uint16)
_U32: Final = np.dtype(np.uint32)

_TYPES: Final = (
    *(f"{kind}{bits}" for kind in "bsu" for bits in (16, 32, 64)),
    *("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"),
)


def _unordered(a: Array, b: Array) -> Array:
    either: Array = (a != a) | (b != b)
    return either


_INTEGER: Final[dict[str, Function]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED_NAMES: Final = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}

_FLOAT: Final[dict[str, Function]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~_unordered(a, b),
    "nan": _unordered,
}
_OPERATORS: Final = tuple(dict.fromkeys([*_FLOAT, *_UNSIGNED_NAMES]))
_COMBINE: Final[dict[str, Function]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def _half_values(kind: str) -> Callable[[Array], Array]:
    """float32 values of the halves of a register."""
    if kind.startswith("bf16"):
        return lambda x: (x.view(_U16).astype(_U32) << np.uint32(16)).view(_F32)
    return lambda x: x.view(np.float16).astype(_F32)


def _comparison(i: Instruction, operator: str, kind: str, *, ftz: bool) -> Function:
    """`operator` on registers of type `kind`; of a pair of halves both comparisons, interleaved."""
    if kind[0] in "bsu" and not kind.startswith("bf16"):
        operator = _UNSIGNED_NAMES.get(operator, operator) if kind[0] == "u" else operator
        allowed = ("eq", "ne") if kind[0] == "b" else tuple(_INTEGER)
        if operator not in allowed or ftz:
            raise UnsupportedInstruction(
                i, f"comparison {operator}{' with ftz' if ftz else ''} of type {kind}"
            )
        function = _INTEGER[operator]
        inside = lane_type(kind)
        if inside == register_type(kind):
            return function
        return lambda a, b: function(a.view(inside), b.view(inside))
    if operator not in _FLOAT:
        raise UnsupportedInstruction(i, f"comparison {operator} of type {kind}")
    function = _FLOAT[operator]
    if kind in ("f32", "f64"):
        if ftz and kind == "f32":
            return lambda a, b: function(flush_single(a.view(_F32)), flush_single(b.view(_F32)))
        if ftz:
            raise UnsupportedInstruction(i, "modifier ftz does not go with f64")
        real = _F32 if kind == "f32" else _F64
        return lambda a, b: function(a.view(real), b.view(real))
    values = _half_values(kind)
    if not ftz:
        return lambda a, b: function(values(a), values(b))
    if kind.startswith("bf16"):
        raise UnsupportedInstruction(i, f"modifier ftz does not go with {kind}")
    return lambda a, b: function(_flush_half(values(a)), _flush_half(values(b)))


def _flush_half(x: Array) -> Array:
    return np.where(np.abs(x) < np.float32(2.0**-14), np.float32(0), x)


@pure("setp", types=("T", "T", "pred"))
def setp(i: Instruction) -> Function:
    """Comparison setp: p = (a CmpOp b) BoolOp c, and q = !(a CmpOp b) BoolOp c.

    Comparisons that end in u are true with a NaN, the others false. Of f16x2 p is the low half's, q the
    other's.
    """
    modifiers = Modifiers(i)
    kind = modifiers.one_of(*_TYPES)
    operator = modifiers.one_of(*_OPERATORS)
    combine = modifiers.one_of(*_COMBINE, default="none")
    ftz = modifiers.flag("ftz")
    modifiers.done()
    operand_count(i, 3 if combine == "none" else 4)
    compare = _comparison(i, operator, kind, ftz=ftz)
    two = isinstance(i.operands[0], PairDestination)
    join = _COMBINE.get(combine)
    if kind in ("f16x2", "bf16x2"):
        if not two:
            raise UnsupportedInstruction(i, "a destination p|q is needed with pairs")

        def halves(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
            both = compare(a, b)
            low, high = both[0::2].copy(), both[1::2].copy()
            return (join(low, c[0]), join(high, c[0])) if join else (low, high)

        return halves
    if not two:
        return (lambda a, b, c: join(compare(a, b), c)) if join else compare

    def with_opposite(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
        result = compare(a, b)
        return (join(result, c[0]), join(~result, c[0])) if join else (result, ~result)

    return with_opposite


_TRUE: Final = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}


@pure("set", types=("T", "T", "pred"))
def set_(i: Instruction) -> Function:
    """Comparison set: d = (a CmpOp b) BoolOp c, true being all ones in an integer type, 1.0 in a real one.

    The first type is the result's, the last the sources'.
    """
    kind = value_type(i)
    types = [modifier for modifier in i.modifiers if modifier in WIDTHS]
    rest = [modifier for modifier in i.modifiers if modifier not in WIDTHS]
    if len(types) != 2 or types[0] not in ("u32", "s32", "u16", "s16", *_TRUE, "f16x2", "bf16x2"):
        raise UnsupportedInstruction(i, "two types are needed: of the result, and of the sources")
    modifiers = Modifiers(i, rest)
    operator = modifiers.one_of(*_OPERATORS)
    combine = modifiers.one_of(*_COMBINE, default="none")
    ftz = modifiers.flag("ftz")
    modifiers.done()
    operand_count(i, 3 if combine == "none" else 4)
    pair = kind.endswith("x2")
    if pair != types[0].endswith("x2") and types[0] not in ("u32", "s32"):
        raise UnsupportedInstruction(i, f"a result of type {types[0]} from {kind}")
    compare = _comparison(i, operator, kind, ftz=ftz)
    join = _COMBINE.get(combine)
    element = _U16 if pair else register_type(types[0])
    one = element.type(_TRUE.get(types[0].removesuffix("x2"), 2 ** (element.itemsize * 8) - 1))

    def compute(a: Array, b: Array, *c: Array) -> Array:
        result = compare(a, b)
        if join:
            result = join(result, np.repeat(c[0], 2) if pair else c[0])
        return np.where(result, one, element.type(0)).view(_U32 if pair else element)

    return compute


@pure("selp", types=("T", "T", "pred"))
def selp(i: Instruction) -> Function:
    """Selection selp: d = (c == 1) ? a : b."""
    operand_count(i, 4)
    modifiers = Modifiers(i)
    modifiers.one_of(*_TYPES)
    modifiers.done()
    where = np.where
    return lambda a, b, c: where(c, a, b)


def _slct_types(i: Instruction) -> tuple[str, ...]:
    result = next((modifier for modifier in i.modifiers if modifier in WIDTHS), "b32")
    return (result, result, value_type(i))


@pure("slct", types=_slct_types)
def slct(i: Instruction) -> Function:
    """Selection slct: d = (c >= 0) ? a : b; -0.0 selects a, NaN selects b."""
    operand_count(i, 4)
    types = [modifier for modifier in i.modifiers if modifier in WIDTHS]
    rest = [modifier for modifier in i.modifiers if modifier not in WIDTHS]
    if len(types) != 2 or types[1] not in ("s32", "f32") or rest not in ([], ["ftz"]):
        raise UnsupportedInstruction(i, "the form is slct{.ftz}.type.s32 or .f32")
    inside = np.dtype(np.int32) if types[1] == "s32" else _F32
    ftz = "ftz" in rest and inside == _F32

    def select(a: Array, b: Array, c: Array) -> Array:
        value = c.view(inside)
        return np.where((flush_single(value) if ftz else value) >= 0, a, b)

    return select
