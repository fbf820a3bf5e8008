"""float32 arithmetic, one or two a register, and its conversions; see ``isa.floating`` and its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attn4.emulator.isa.registry import WIDTHS
from attn4.emulator.isa.special import is_default
from attn4.emulator.ptx.module import Instruction, Register
from attn4.emulator.vector.body import LANES, Body, Results, Value, constant
from attn4.emulator.vector.registry import vector

_FLOAT: Final = f"<{LANES} x float>"
_DOUBLE: Final = f"<{LANES} x double>"
_BOOL: Final = f"<{LANES} x i1>"
_ARITHMETIC: Final = {"add": "fadd", "sub": "fsub", "mul": "fmul"}
FUNCTIONS: Final = ("exp2", "log2")
"""Functions on float64 that vector code calls in numpy: their places in the table."""

Single = Callable[..., str]


def _value(name: str) -> Value:
    return Value(32, real=name, raw=True)


def _flushed(body: Body, x: str) -> str:
    """Subnormal numbers to zero of their sign."""
    magnitude = body.float_call("fabs", x)
    tiny = body.line(f"fcmp olt {_FLOAT} {magnitude}, splat (float 0x3810000000000000)")
    zero = body.float_call("copysign", "splat (float 0.0)", x)
    return body.line(f"select {_BOOL} {tiny}, {_FLOAT} {zero}, {_FLOAT} {x}")


def _each(body: Body, kind: str, function: Single, sources: tuple[Value, ...]) -> Value:
    """`function` on float names, once, or on both halves of f32x2."""
    if kind == "f32":
        return _value(function(*(body.real(source) for source in sources)))
    halves = [body.parts(source) for source in sources]
    low, high = (_value(function(*(body.real(pair[n]) for pair in halves))) for n in (0, 1))
    return Value(64, halves=(low, high))


def _toward(body: Body, mode: str, a: str, b: str) -> str:
    """The float32 sum in mode rm, rp or rz: the nearest to the exact sum, one step back where it is beyond.

    The exact sum is a float64 and its error; neither can lie beyond a float32 that the float64 is not beyond.
    """
    x, y = (body.line(f"fpext {_FLOAT} {name} to {_DOUBLE}") for name in (a, b))
    total = body.line(f"fadd {_DOUBLE} {x}, {y}")
    part = body.line(f"fsub {_DOUBLE} {total}, {x}")
    first = body.line(f"fsub {_DOUBLE} {x}, {body.line(f'fsub {_DOUBLE} {total}, {part}')}")
    error = body.line(f"fadd {_DOUBLE} {first}, {body.line(f'fsub {_DOUBLE} {y}, {part}')}")
    nearest = body.line(f"fptrunc {_DOUBLE} {total} to {_FLOAT}")
    back = body.line(f"fpext {_FLOAT} {nearest} to {_DOUBLE}")
    down = _beyond(body, back, total, error, "ogt", "olt")
    up = _beyond(body, back, total, error, "olt", "ogt")
    bits = body.line(f"bitcast {_FLOAT} {nearest} to <{LANES} x i32>")
    negative = body.line(f"icmp slt <{LANES} x i32> {bits}, zeroinitializer")
    if mode == "rz":
        wrong = body.line(f"select {_BOOL} {negative}, {_BOOL} {up}, {_BOOL} {down}")
        step = "splat (i32 -1)"
    else:
        wrong = down if mode == "rm" else up
        toward, away = ("1", "-1") if mode == "rm" else ("-1", "1")
        words = f"<{LANES} x i32> splat (i32 {toward}), <{LANES} x i32> splat (i32 {away})"
        step = body.line(f"select {_BOOL} {negative}, {words}")
    moved = body.line(f"add <{LANES} x i32> {bits}, {step}")
    chosen = body.line(f"select {_BOOL} {wrong}, <{LANES} x i32> {moved}, <{LANES} x i32> {bits}")
    result = body.line(f"bitcast <{LANES} x i32> {chosen} to {_FLOAT}")
    return _negative_zero(body, result, a, b) if mode == "rm" else result


def _beyond(body: Body, back: str, total: str, error: str, above: str, side: str) -> str:
    beyond = body.line(f"fcmp {above} {_DOUBLE} {back}, {total}")
    equal = body.line(f"fcmp oeq {_DOUBLE} {back}, {total}")
    off = body.line(f"fcmp {side} {_DOUBLE} {error}, zeroinitializer")
    return body.line(f"or {_BOOL} {beyond}, {body.line(f'and {_BOOL} {equal}, {off}')}")


def _negative_zero(body: Body, total: str, a: str, b: str) -> str:
    """In mode rm a sum of zero is -0 unless both terms are +0 (IEEE 754, 6.3)."""
    zero = body.line(f"fcmp oeq {_FLOAT} {total}, zeroinitializer")
    words = [body.line(f"bitcast {_FLOAT} {name} to <{LANES} x i32>") for name in (a, b)]
    either = body.line(f"or <{LANES} x i32> {words[0]}, {words[1]}")
    signed = body.line(f"icmp slt <{LANES} x i32> {either}, zeroinitializer")
    both = body.line(f"and {_BOOL} {zero}, {signed}")
    return body.line(f"select {_BOOL} {both}, {_FLOAT} splat (float -0.0), {_FLOAT} {total}")


def _core(body: Body, i: Instruction, mode: str) -> Single | None:
    if mode == "rn":
        if i.opcode in _ARITHMETIC:
            operation = _ARITHMETIC[i.opcode]
            return lambda a, b: body.line(f"{operation} {_FLOAT} {a}, {b}")
        return lambda a, b, c: body.float_call("fma", a, b, c)
    if i.opcode == "add":
        return lambda a, b: _toward(body, mode, a, b)
    if i.opcode == "sub":
        return lambda a, b: _toward(body, mode, a, body.line(f"fneg {_FLOAT} {b}"))
    return None


@vector("add", "sub", "mul", "fma", "mad")
def arithmetic(body: Body, i: Instruction, *sources: Value) -> Results:
    """f32 and f32x2, rounded to nearest; sums also in the other modes; .ftz."""
    kinds = [m for m in i.modifiers if m in ("f32", "f32x2")]
    if len(kinds) != 1 or "hi" in i.modifiers:
        return None
    rest = [m for m in i.modifiers if m not in ("f32", "f32x2")]
    modes = [m for m in rest if m in ("rn", "rz", "rm", "rp")]
    narrow = [m for m in rest if m == "bf16"]
    ftz = "ftz" in rest
    if len(modes) + len(narrow) + ftz != len(rest) or (narrow and i.opcode == "mul"):
        return None
    core = _core(body, i, modes[0] if modes else "rn")
    if core is None:
        return None
    if narrow:
        sources = (*(_widened(body, x) for x in sources[:-1]), sources[-1])
        if any(x.bits != 32 for x in sources):
            return None

    def function(*names: str) -> str:
        return _flushed(body, core(*(_flushed(body, name) for name in names)))

    return _each(body, kinds[0], function if ftz else core, sources)


def _widened(body: Body, x: Value) -> Value:
    """bf16 as float32."""
    word = body.resized(x, 32, signed=False)
    return body.binary("shl", word, constant(16, 32))


@vector("neg", "abs")
def sign(body: Body, i: Instruction, a: Value) -> Results:
    """The sign bit of f32 inverted or cleared; a NaN becomes the canonical one."""
    if i.modifiers != ("f32",):
        return None
    x = body.real(a)
    return _value(body.line(f"fneg {_FLOAT} {x}") if i.opcode == "neg" else body.float_call("fabs", x))


def _extreme(body: Body, a: str, b: str, *, largest: bool, propagate: bool) -> str:
    """Of a NaN and a number the number (or the NaN, to `propagate`); -0 < +0."""
    order = "ogt" if largest else "olt"
    first = body.line(f"fcmp {order} {_FLOAT} {a}, {b}")
    result = body.line(f"select {_BOOL} {first}, {_FLOAT} {a}, {_FLOAT} {b}")
    # Now b stands where neither is the greater: equal, zeros of two signs, or a NaN.
    words = [body.line(f"bitcast {_FLOAT} {name} to <{LANES} x i32>") for name in (a, b)]
    joined = body.line(f"{'and' if largest else 'or'} <{LANES} x i32> {words[0]}, {words[1]}")
    merged = body.line(f"bitcast <{LANES} x i32> {joined} to {_FLOAT}")
    equal = body.line(f"fcmp oeq {_FLOAT} {a}, {b}")
    result = body.line(f"select {_BOOL} {equal}, {_FLOAT} {merged}, {_FLOAT} {result}")
    test = a if propagate else b
    nan = body.line(f"fcmp uno {_FLOAT} {test}, {test}")
    return body.line(f"select {_BOOL} {nan}, {_FLOAT} {a}, {_FLOAT} {result}")


@vector("min", "max")
def extreme(body: Body, i: Instruction, a: Value, b: Value, *c: Value) -> Results:
    """Of two or three f32."""
    rest = [m for m in i.modifiers if m not in ("f32", "NaN", "ftz")]
    if rest or "f32" not in i.modifiers:
        return None
    propagate, ftz = "NaN" in i.modifiers, "ftz" in i.modifiers
    values = [body.real(x) for x in (a, b, *c)]
    if ftz:
        values = [_flushed(body, x) for x in values]
    result = values[0]
    for value in values[1:]:
        result = _extreme(body, result, value, largest=i.opcode == "max", propagate=propagate)
    return _value(result)


@vector("ex2", "lg2")
def through_numpy(body: Body, i: Instruction, a: Value) -> Results:
    """Evaluated in float64 by the function that ``isa.special`` calls."""
    if set(i.modifiers) - {"approx", "ftz", "f32"} or not is_default(i.opcode):
        return None
    x = body.real(a)
    if "ftz" not in i.modifiers:
        return _value(body.through_double(_slot(i), x))
    if i.opcode == "lg2":
        return _value(_flushed(body, body.through_double(_slot(i), _flushed(body, x))))
    result = body.through_double(_slot(i), x)
    small = body.line(f"fcmp olt {_FLOAT} {x}, splat (float -126.0)")
    return _value(body.line(f"select {_BOOL} {small}, {_FLOAT} zeroinitializer, {_FLOAT} {result}"))


def _slot(i: Instruction) -> int:
    return FUNCTIONS.index("exp2" if i.opcode == "ex2" else "log2")


@vector("rcp", "rsqrt", "sqrt")
def in_double(body: Body, i: Instruction, a: Value) -> Results:
    """The approximate forms: a quotient or root in float64, rounded."""
    if set(i.modifiers) - {"approx", "ftz", "f32"} or "approx" not in i.modifiers or not is_default(i.opcode):
        return None
    ftz = "ftz" in i.modifiers
    x = _flushed(body, body.real(a)) if ftz else body.real(a)
    wide = body.line(f"fpext {_FLOAT} {x} to {_DOUBLE}")
    if i.opcode != "rcp":
        wide = body.line(f"call {_DOUBLE} @llvm.sqrt.v{LANES}f64({_DOUBLE} {wide})")
    if i.opcode != "sqrt":
        wide = body.line(f"fdiv {_DOUBLE} splat (double 1.0), {wide}")
    result = body.line(f"fptrunc {_DOUBLE} {wide} to {_FLOAT}")
    return _value(_flushed(body, result) if ftz else result)


@vector("cvt")
def pair_of_bf16(body: Body, i: Instruction, a: Value, b: Value | None = None) -> Results:
    """Two f32 to bf16x2, to nearest even, by integers; a becomes the upper half."""
    if i.modifiers != ("rn", "bf16x2", "f32") or b is None:
        return None
    upper, lower = (_rounded(body, x) for x in (a, b))
    high = body.binary("and", upper, constant(0xFFFF0000, 32))
    return body.binary("or", high, body.binary("lshr", lower, constant(16, 32)))


def _rounded(body: Body, x: Value) -> Value:
    """Bits of float32 plus half of bf16's last place, less one where that bit is even; NaN 0x7fffxxxx."""
    real = body.real(x)
    bits = Value(32, integer=body.line(f"bitcast {_FLOAT} {real} to <{LANES} x i32>"))
    odd = body.binary("and", body.binary("lshr", bits, constant(16, 32)), constant(1, 32))
    total = body.binary("add", body.binary("add", odd, constant(0x7FFF, 32)), bits)
    nan = body.line(f"fcmp uno {_FLOAT} {real}, {real}")
    return body.choose(nan, constant(0x7FFF0000, 32), total)


@vector("cvt")
def one_bf16(body: Body, i: Instruction, a: Value, *_: Value) -> Results:
    """f32 to bf16, to nearest even, in a register of 16 bits."""
    operand = i.operands[0]
    if (
        i.modifiers != ("rn", "bf16", "f32")
        or not isinstance(operand, Register)
        or WIDTHS[operand.type] != 16
    ):
        return None
    upper = body.binary("lshr", _rounded(body, a), constant(16, 32))
    return body.resized(upper, 16, signed=False)


@vector("cvt")
def from_integer(body: Body, i: Instruction, a: Value, *_: Value) -> Results:
    """32-bit and 64-bit integers to f32, to nearest even."""
    if len(i.modifiers) != 3 or i.modifiers[:2] != ("rn", "f32") or i.modifiers[2] not in ("s32", "u32"):
        return None
    if a.bits != 32:
        return None
    operation = "sitofp" if i.modifiers[2][0] == "s" else "uitofp"
    return _value(body.line(f"{operation} <{LANES} x i32> {body.integer(a)} to {_FLOAT}"))
