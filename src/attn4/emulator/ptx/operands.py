"""Operands and instructions: text to records, in the scope where it stands."""

from __future__ import annotations

import re

from attn4.emulator.ptx.errors import PtxError, UnsupportedError
from attn4.emulator.ptx.module import (
    Address,
    Guard,
    Immediate,
    Instruction,
    Label,
    Negated,
    Operand,
    PairDestination,
    Register,
    Sink,
    SourceLocation,
    SpecialRegister,
    Symbol,
    Vector,
)
from attn4.emulator.ptx.numbers import immediate, signed
from attn4.emulator.ptx.scan import IDENTIFIER, split
from attn4.emulator.ptx.scope import Scope
from attn4.emulator.ptx.special import SPECIAL_REGISTERS

_INSTRUCTION = re.compile(
    rf"""(?:@\s*(?P<not>!?)\s*(?P<guard>{IDENTIFIER})\s+)?
    (?P<name>[A-Za-z]\w*(?:\s*\.\s*\w+(?:::\w+)*)*)
    (?P<operands>(?:[\s\[{{(].*)?)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_NAME = re.compile(IDENTIFIER, re.ASCII)
_SUM = re.compile(
    rf"(?P<base>{IDENTIFIER}|\w+)\s*(?P<terms>(?:[+-]\s*-?\s*\w+\s*)*)",
    re.ASCII,
)
_TERM = re.compile(r"([+-])\s*(-?)\s*(\w+)", re.ASCII)
_WARP_SIZE = Immediate(32, "s64")
_SINK = Sink()
_UNSUPPORTED = frozenset(("alloca", "stacksave", "stackrestore"))


def instruction(text: str, scope: Scope, line: int, source: SourceLocation | None) -> Instruction:
    """The record of one statement, without its semicolon."""
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise PtxError(f"no instruction: {_shown(text)}", line)
    negation, guarded, name, rest = match.groups()
    guard = Guard(_predicate(guarded, scope, line), negation == "!") if guarded else None
    opcode, *modifiers = "".join(name.split()).split(".")
    if opcode in _UNSUPPORTED:
        raise UnsupportedError(f"the emulator has no {opcode}", line)
    operands = tuple([_cached(part, scope, line) for part in split(rest, line)])
    return Instruction(opcode, tuple(modifiers), operands, guard, line, source)


def _shown(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 80 else words[:77] + "..."


def _cached(text: str, scope: Scope, line: int) -> Operand:
    found = scope.operands.get(text)
    if found is None:
        found = scope.operands[text] = _operand(text, scope, line)
    return found


def _operand(text: str, scope: Scope, line: int) -> Operand:
    first = text[0]
    if first == "{":
        return _vector(text, scope, line)
    if first == "[":
        return _address(text, scope, line)
    if first == "!":
        return Negated(_predicate(text[1:].strip(), scope, line))
    if "|" in text:
        return _pair(text, scope, line)
    if first == "(":
        raise UnsupportedError(f"an expression, {_shown(text)}", line)
    return _scalar(text, scope, line)


def _scalar(
    text: str, scope: Scope, line: int
) -> Register | SpecialRegister | Immediate | Symbol | Label | Sink:
    if text == "_":
        return _SINK
    if text[0] in "0123456789+-.":
        return immediate(text, line)
    found = scope.find(text) or SPECIAL_REGISTERS.get(text)
    if found is not None:
        return found
    if text == "WARP_SZ":
        return _WARP_SIZE
    match = _SUM.fullmatch(text)
    if match is not None and match["terms"]:
        symbol = _named(match["base"], scope, line)
        if isinstance(symbol, Symbol):
            return Symbol(symbol.name, _offset(match["terms"], line))
    raise _unknown(text, scope, line)


def _unknown(text: str, scope: Scope, line: int) -> PtxError:
    if _NAME.fullmatch(text):
        return PtxError(f"{text} is not declared", line)
    part = _NAME.match(text)
    if part and text[part.end()] in ".[" and scope.find(part.group()):
        return UnsupportedError(f"a part of a register or variable, {_shown(text)}", line)
    return PtxError(f"no operand: {_shown(text)}", line)


def _named(name: str, scope: Scope, line: int) -> Register | Symbol | Label:
    found = scope.find(name)
    if found is None:
        raise _unknown(name, scope, line)
    return found


def _predicate(name: str, scope: Scope, line: int) -> Register:
    found = _named(name, scope, line) if name else None
    if not isinstance(found, Register) or found.type != "pred":
        raise PtxError(f"{name or 'nothing'} stands where a predicate belongs", line)
    return found


def _vector(text: str, scope: Scope, line: int) -> Vector:
    parts = split(_inside(text, "}", line), line)
    items = []
    for part in parts:
        item = None if part[0] in "{[" else _cached(part, scope, line)
        if item is None or isinstance(item, (Vector, Address, PairDestination, Negated, Label)):
            raise PtxError(f"{_shown(part)} cannot be an element of a vector", line)
        items.append(item)
    if not items:
        raise PtxError("a vector without elements", line)
    return Vector(tuple(items))


def _inside(text: str, closer: str, line: int) -> str:
    if not text.endswith(closer):
        raise PtxError(f"no operand: {_shown(text)}", line)
    return text[1:-1]


def _address(text: str, scope: Scope, line: int) -> Address:
    first, *others = split(_inside(text, "]", line), line) or [""]
    match = _SUM.fullmatch(first)
    if match is None:
        raise PtxError(f"no address: {_shown(text)}", line)
    name, terms = match.groups()
    base: Register | Symbol | Label | Immediate
    base = immediate(name, line) if name[0] in "0123456789" else _named(name, scope, line)
    if isinstance(base, Label) or (isinstance(base, Immediate) and base.type not in ("s64", "u64")):
        raise PtxError(f"{name} is no address", line)
    if any(part[0] == "[" for part in others):
        raise PtxError(f"an address within an address: {_shown(text)}", line)
    coordinates = tuple(_cached(part, scope, line) for part in others)
    return Address(base, _offset(terms, line), coordinates)


def _offset(terms: str, line: int) -> int:
    total = 0
    for sign, negative, digits in _TERM.findall(terms):
        constant = immediate(negative + digits, line)
        if constant.type not in ("s64", "u64"):
            raise PtxError(f"{digits} is no offset", line)
        total += -signed(constant) if sign == "-" else signed(constant)
    if not -(2**63) <= total < 2**64:
        raise PtxError(f"the offset {total} needs more than 64 bits", line)
    return total


def _pair(text: str, scope: Scope, line: int) -> PairDestination:
    first, _, second = text.partition("|")
    return PairDestination(_result(first.strip(), scope, line), _result(second.strip(), scope, line))


def _result(name: str, scope: Scope, line: int) -> Register | Sink:
    if name == "_":
        return _SINK
    found = _named(name, scope, line) if name else None
    if not isinstance(found, Register):
        raise PtxError(f"{name or 'nothing'} stands where a result belongs", line)
    return found
