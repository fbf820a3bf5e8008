"""The text of one vector function: values of `LANES` lanes, and the ways to look at their bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LANES: Final = 16
"""Lanes that a function computes at a time: half a warp, one AVX-512 register of 32-bit words."""

_NAN: Final = "splat (float 0x7FFFFFFFE0000000)"


@dataclass(slots=True)
class Value:
    """A register's value of ``bits`` a lane: as an integer, a float, or two halves, whichever has been made.

    ``raw``: the float may be a NaN of other bits than the canonical ones, which `Body.integer` mends. Names
    are LLVM operands, so that a constant needs no instruction.
    """

    bits: int
    integer: str | None = None
    real: str | None = None
    halves: tuple[Value, Value] | None = None
    raw: bool = False
    constant: int | None = None


def constant(value: int, bits: int) -> Value:
    """The same integer in all lanes."""
    value &= (1 << bits) - 1
    text = f"splat (i1 {'true' if value else 'false'})" if bits == 1 else f"splat (i{bits} {value})"
    return Value(bits, integer=text, constant=value)


class Body:
    """Instructions of one function, as LLVM text, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.calls = False

    def line(self, text: str) -> str:
        """Append an instruction; the name of its result."""
        name = f"%v{len(self.lines)}"
        self.lines.append(f"  {name} = {text}")
        return name

    def act(self, text: str) -> None:
        """Append an instruction without a result."""
        self.lines.append(f"  {text}")

    def integer(self, value: Value) -> str:
        """The bits as an integer vector; of a predicate as i1."""
        if value.integer is None:
            if value.halves is not None:
                value.integer = self._joined(value)
            else:
                kind = "float" if value.bits == 32 else "double"
                real = self._canonical(value)
                value.integer = self.line(f"bitcast <{LANES} x {kind}> {real} to <{LANES} x i{value.bits}>")
        return value.integer

    def real(self, value: Value) -> str:
        """The bits as a float (32) or double (64) vector."""
        if value.real is None:
            kind = "float" if value.bits == 32 else "double"
            value.real = self.line(
                f"bitcast <{LANES} x i{value.bits}> {self.integer(value)} to <{LANES} x {kind}>"
            )
        return value.real

    def parts(self, value: Value) -> tuple[Value, Value]:
        """The lower and the upper 32 bits of a 64-bit value."""
        if value.halves is None:
            if value.constant is not None:
                value.halves = (constant(value.constant, 32), constant(value.constant >> 32, 32))
            else:
                whole = self.integer(value)
                upper = self.unary("lshr", whole, 64, "splat (i64 32)")
                value.halves = tuple(  # type: ignore[assignment]
                    Value(32, integer=self.convert("trunc", word, 64, 32)) for word in (whole, upper)
                )
        assert value.halves is not None
        return value.halves

    def unary(self, operation: str, a: str, bits: int, b: str) -> str:
        """An integer operation of two operand names."""
        return self.line(f"{operation} <{LANES} x i{bits}> {a}, {b}")

    def binary(self, operation: str, a: Value, b: Value) -> Value:
        """An integer operation of two values of one width."""
        name = self.unary(operation, self.integer(a), a.bits, self.integer(b))
        return Value(a.bits, integer=name)

    def convert(self, operation: str, name: str, source: int, target: int) -> str:
        """Trunc, zext or sext between integer widths."""
        if source == target:
            return name
        return self.line(f"{operation} <{LANES} x i{source}> {name} to <{LANES} x i{target}>")

    def resized(self, value: Value, bits: int, *, signed: bool) -> Value:
        """An integer of another width."""
        if value.bits == bits:
            return value
        if value.bits == 64 and value.halves is not None and bits == 32:
            return value.halves[0]
        if bits == 64 and value.bits == 32 and not signed:
            return Value(64, halves=(value, constant(0, 32)))
        operation = "trunc" if bits < value.bits else "sext" if signed else "zext"
        return Value(bits, integer=self.convert(operation, self.integer(value), value.bits, bits))

    def compare(self, predicate: str, a: Value, b: Value) -> str:
        """An integer comparison; the name of an i1 vector."""
        return self.line(f"icmp {predicate} <{LANES} x i{a.bits}> {self.integer(a)}, {self.integer(b)}")

    def choose(self, condition: str, a: Value, b: Value) -> Value:
        """Lane by lane a where the condition holds, else b."""
        if a.bits == 64 and a.halves is not None and b.halves is not None:
            low, high = (self.choose(condition, x, y) for x, y in zip(a.halves, b.halves, strict=True))
            return Value(64, halves=(low, high))
        kind = f"<{LANES} x i{a.bits}>"
        return Value(
            a.bits,
            integer=self.line(
                f"select <{LANES} x i1> {condition}, {kind} {self.integer(a)}, {kind} {self.integer(b)}"
            ),
        )

    def inverted(self, value: Value) -> Value:
        """All bits inverted."""
        if value.constant is not None:
            return constant(~value.constant, value.bits)
        return self.binary("xor", value, constant(-1, value.bits))

    def float_call(self, name: str, *sources: str) -> str:
        """An intrinsic on floats."""
        kind = f"<{LANES} x float>"
        arguments = ", ".join(f"{kind} {source}" for source in sources)
        return self.line(f"call {kind} @llvm.{name}.v{LANES}f32({arguments})")

    def through_double(self, slot: int, x: str) -> str:
        """Floats through function ``slot`` of the table, which works on doubles, and rounded."""
        self.calls = True
        wide = self.line(f"fpext <{LANES} x float> {x} to <{LANES} x double>")
        self.act(f"store <{LANES} x double> {wide}, ptr %from, align 128")
        entry = self.line(f"getelementptr [16 x ptr], ptr @functions, i64 0, i64 {2 * slot}")
        function = self.line(f"load ptr, ptr {entry}")
        entry = self.line(f"getelementptr [16 x ptr], ptr @functions, i64 0, i64 {2 * slot + 1}")
        data = self.line(f"load ptr, ptr {entry}")
        self.act(f"call void {function}(ptr %arguments, ptr %count, ptr %steps, ptr {data})")
        result = self.line(f"load <{LANES} x double>, ptr %to, align 128")
        return self.line(f"fptrunc <{LANES} x double> {result} to <{LANES} x float>")

    def _joined(self, value: Value) -> str:
        assert value.halves is not None
        low, high = (self.integer(half) for half in value.halves)
        order = ", ".join(f"i32 {n // 2 + n % 2 * LANES}" for n in range(2 * LANES))
        both = self.line(
            f"shufflevector <{LANES} x i32> {low}, <{LANES} x i32> {high}, <{2 * LANES} x i32> <{order}>"
        )
        return self.line(f"bitcast <{2 * LANES} x i32> {both} to <{LANES} x i64>")

    def _canonical(self, value: Value) -> str:
        real = value.real
        assert real is not None
        if not value.raw:
            return real
        wrong = self.line(f"fcmp uno <{LANES} x float> {real}, {real}")
        kind = f"<{LANES} x float>"
        return self.line(f"select <{LANES} x i1> {wrong}, {kind} {_NAN}, {kind} {real}")


Results = Value | tuple[Value, ...] | None
Emitter = Callable[..., Results]
