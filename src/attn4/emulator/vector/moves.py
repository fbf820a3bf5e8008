"""Copies, packing, and conversion between integers; see ``isa.move``, ``isa.convert`` and ``isa.logic``."""

from __future__ import annotations

from typing import Final

from attn4.emulator.isa.registry import WIDTHS
from attn4.emulator.ptx.module import Immediate, Instruction, Register, Vector
from attn4.emulator.vector.body import Body, Results, Value, constant
from attn4.emulator.vector.registry import vector

_INTEGERS: Final = frozenset(f"{kind}{bits}" for kind in "su" for bits in (8, 16, 32, 64))


@vector("mov")
def mov(body: Body, i: Instruction, *sources: Value) -> Results:
    """A copy, or registers put together or taken apart, the first the least significant."""
    destination, source = i.operands
    if isinstance(destination, Vector):
        return _apart(body, sources[0], len(destination.items))
    if not isinstance(source, Vector):
        return sources[0]
    bits = WIDTHS[i.modifiers[-1]]
    if len(sources) != 2 or bits not in (32, 64) or any(value.bits * 2 != bits for value in sources):
        return None
    if bits == 64:
        return Value(64, halves=(sources[0], sources[1]))
    low, high = (body.resized(value, 32, signed=False) for value in sources)
    return body.binary("or", low, body.binary("shl", high, constant(16, 32)))


def _apart(body: Body, whole: Value, count: int) -> Results:
    if count != 2 or whole.bits not in (32, 64):
        return None
    if whole.bits == 64:
        return body.parts(whole)
    upper = body.binary("lshr", whole, constant(16, 32))
    return body.resized(whole, 16, signed=False), body.resized(upper, 16, signed=False)


@vector("cvta")
def cvta(_: Body, __: Instruction, a: Value) -> Results:
    """A copy: generic addresses are the addresses themselves."""
    return a


@vector("cvt")
def between_integers(body: Body, i: Instruction, a: Value, *_: Value) -> Results:
    """Extension by the source's sign, or a cut, to the target's width and on to the register's."""
    if len(i.modifiers) != 2 or not set(i.modifiers) <= _INTEGERS:
        return None
    target, source = i.modifiers
    value = body.resized(a, WIDTHS[source], signed=False)
    value = body.resized(value, WIDTHS[target], signed=source[0] == "s")
    operand = i.operands[0]
    width = WIDTHS[operand.type] if isinstance(operand, Register) else max(WIDTHS[target], 16)
    return body.resized(value, width, signed=target[0] == "s")


@vector("prmt")
def prmt(body: Body, i: Instruction, a: Value, b: Value, selector: Value) -> Results:
    """Bytes of the pair (b, a) at places given by a constant, without the spreading of signs."""
    if i.modifiers != ("b32",) or not isinstance(i.operands[3], Immediate) or selector.constant is None:
        return None
    nibbles = [selector.constant >> shift & 15 for shift in (0, 4, 8, 12)]
    if any(nibble & 8 for nibble in nibbles):
        return None
    result: Value | None = None
    for n, nibble in enumerate(nibbles):
        byte = body.binary("and", (a, b)[nibble >> 2], constant(0xFF << 8 * (nibble & 3), 32))
        distance = 8 * (n - (nibble & 3))
        if distance:
            operation = "shl" if distance > 0 else "lshr"
            byte = body.binary(operation, byte, constant(abs(distance), 32))
        result = byte if result is None else body.binary("or", result, byte)
    return result
