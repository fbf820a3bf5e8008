"""Integer arithmetic, logic, shifts and comparison; see ``isa.integer``, ``isa.logic``, ``isa.compare``."""

from __future__ import annotations

from typing import Final

from attn4.emulator.isa.registry import WIDTHS
from attn4.emulator.ptx.module import Immediate, Instruction, PairDestination
from attn4.emulator.vector.body import LANES, Body, Results, Value, constant
from attn4.emulator.vector.registry import vector

_SCALAR: Final = frozenset(f"{kind}{bits}" for kind in "su" for bits in (16, 32, 64))
_LOGIC: Final = frozenset({"pred", "b16", "b32", "b64"})


@vector("add", "sub")
def add(body: Body, i: Instruction, a: Value, b: Value, *_: Value) -> Results:
    """Wrapping sums and differences."""
    if len(i.modifiers) != 1 or i.modifiers[0] not in _SCALAR:
        return None
    return body.binary(i.opcode, a, b)


def _product(body: Body, i: Instruction, a: Value, b: Value) -> Value | None:
    if len(i.modifiers) != 2 or i.modifiers[1] not in _SCALAR:
        return None
    mode, kind = i.modifiers
    bits, signed = WIDTHS[kind], kind[0] == "s"
    if mode == "lo":
        return body.binary("mul", a, b)
    if bits == 64:
        return None
    wide = body.binary("mul", *(body.resized(x, 2 * bits, signed=signed) for x in (a, b)))
    if mode == "wide":
        return wide
    upper = body.binary("lshr", wide, constant(bits, 2 * bits))
    return body.resized(upper, bits, signed=False)


@vector("mul")
def mul(body: Body, i: Instruction, a: Value, b: Value) -> Results:
    """Lower half, upper half or all of a product."""
    return _product(body, i, a, b)


@vector("mad")
def mad(body: Body, i: Instruction, a: Value, b: Value, c: Value, *_: Value) -> Results:
    """A product as in `mul`, plus c."""
    product = _product(body, i, a, b)
    return None if product is None else body.binary("add", product, c)


@vector("neg")
def neg(body: Body, i: Instruction, a: Value) -> Results:
    """The difference from zero."""
    return body.binary("sub", constant(0, a.bits), a) if i.modifiers[0] in _SCALAR else None


@vector("abs")
def absolute(body: Body, i: Instruction, a: Value) -> Results:
    """The magnitude; the least number stays."""
    if i.modifiers[0] not in ("s16", "s32", "s64"):
        return None
    negative = body.compare("slt", a, constant(0, a.bits))
    return body.choose(negative, body.binary("sub", constant(0, a.bits), a), a)


@vector("min", "max")
def extreme(body: Body, i: Instruction, a: Value, b: Value, *_: Value) -> Results:
    """The smaller or larger of two integers."""
    if len(i.modifiers) != 1 or i.modifiers[0] not in _SCALAR:
        return None
    order = i.modifiers[0][0] + ("lt" if i.opcode == "min" else "gt")
    return body.choose(body.compare(order, a, b), a, b)


@vector("and", "or", "xor")
def logic(body: Body, i: Instruction, a: Value, b: Value) -> Results:
    """Bit by bit; of predicates, too."""
    if len(i.modifiers) != 1 or i.modifiers[0] not in _LOGIC:
        return None
    if a.halves is not None and b.halves is not None:
        low, high = (body.binary(i.opcode, x, y) for x, y in zip(a.halves, b.halves, strict=True))
        return Value(64, halves=(low, high))
    return body.binary(i.opcode, a, b)


@vector("not")
def bitwise_not(body: Body, _: Instruction, a: Value) -> Results:
    """All bits inverted."""
    return body.inverted(a)


@vector("shl", "shr")
def shift(body: Body, i: Instruction, a: Value, b: Value) -> Results:
    """Amounts from the width on shift everything out; LLVM leaves those open."""
    if len(i.modifiers) != 1:
        return None
    bits = a.bits
    arithmetic = i.opcode == "shr" and i.modifiers[0][0] == "s"
    operation = "shl" if i.opcode == "shl" else "ashr" if arithmetic else "lshr"
    if b.constant is not None:
        amount = min(b.constant, bits - 1 if arithmetic else bits)
        if amount == bits:
            return constant(0, bits)
        return body.binary(operation, a, constant(amount, bits))
    limit = constant(bits - 1, 32)
    inside = body.compare("ule", b, limit)
    clamped = body.choose(inside, b, limit)
    distance = body.resized(clamped, bits, signed=False)
    shifted = body.binary(operation, a, distance)
    return shifted if arithmetic else body.choose(inside, shifted, constant(0, bits))


@vector("lop3")
def lop3(body: Body, i: Instruction, a: Value, b: Value, c: Value, table: Value, *rest: Value) -> Results:
    """The bitwise function with a truth table, as exclusive or of products; see ``isa.logic.lookup``."""
    if (
        i.modifiers != ("b32",)
        or rest
        or table.constant is None
        or isinstance(i.operands[0], PairDestination)
    ):
        return None
    terms = [table.constant >> n & 1 for n in range(8)]
    for step in (1, 2, 4):
        for n in range(8):
            if n & step:
                terms[n] ^= terms[n ^ step]
    result = constant(-1 if terms[0] else 0, 32)
    for n in range(1, 8):
        if terms[n]:
            term = constant(-1, 32)
            for bit, source in ((4, a), (2, b), (1, c)):
                if n & bit:
                    term = source if term.constant is not None else body.binary("and", term, source)
            zero = result.constant == 0
            result = term if zero else body.binary("xor", result, term)
    return result


_COMPARE: Final = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
_UNSIGNED: Final = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_ORDERED: Final = {"eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_UNORDERED: Final = {"equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge"}
_REAL: Final = {**_ORDERED, **_UNORDERED, "num": "ord", "nan": "uno"}
_JOIN: Final = ("and", "or", "xor")


@vector("setp")
def setp(body: Body, i: Instruction, a: Value, b: Value, *c: Value) -> Results:
    """A comparison, joined with a predicate; two destinations also get the opposite."""
    kind, operator = i.modifiers[-1], i.modifiers[0]
    join = i.modifiers[1] if len(i.modifiers) == 3 else ""
    if len(i.modifiers) > 3 or (join and join not in _JOIN):
        return None
    if kind == "f32":
        if operator not in _REAL:
            return None
        name = body.line(f"fcmp {_REAL[operator]} <{LANES} x float> {body.real(a)}, {body.real(b)}")
    elif kind[0] in "bsu" and kind != "bf16" and not kind.startswith("bf16"):
        order = _COMPARE.get(_UNSIGNED.get(operator, operator))
        if order is None:
            return None
        sign = "" if order in ("eq", "ne") else "s" if kind[0] == "s" else "u"
        name = body.compare(sign + order, a, b)
    else:
        return None
    result = Value(1, integer=name)
    both = [result]
    if isinstance(i.operands[0], PairDestination):
        both.append(body.inverted(result))
    if join:
        both = [body.binary(join, value, c[0]) for value in both]
    return tuple(both)


@vector("selp")
def selp(body: Body, i: Instruction, a: Value, b: Value, c: Value) -> Results:
    """The first where the predicate holds, else the second."""
    if len(i.modifiers) != 1 or a.bits != b.bits or c.bits != 1:
        return None
    return body.choose(body.integer(c), a, b)


@vector("bfe")
def bfe(body: Body, i: Instruction, a: Value, at: Value, length: Value) -> Results:
    """A bit field at constant places."""
    if not isinstance(i.operands[2], Immediate) or at.constant is None or length.constant is None:
        return None
    start, count = (min((value.constant or 0) & 0xFF, a.bits) for value in (at, length))
    if count == 0 or start + count > a.bits:
        return None
    left = body.binary("shl", a, constant(a.bits - start - count, a.bits))
    return body.binary("ashr" if i.modifiers[0][0] == "s" else "lshr", left, constant(a.bits - count, a.bits))
