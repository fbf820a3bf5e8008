"""How vector definitions are declared and found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Final

from attn4.emulator.isa.registry import WIDTHS, Operation
from attn4.emulator.isa.special import APPROXIMATIONS, is_default
from attn4.emulator.ptx.module import (
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Sink,
    SpecialRegister,
    Symbol,
)
from attn4.emulator.state.special_registers import VARYING
from attn4.emulator.vector.body import Body, Emitter, Results, Value, constant

EMITTERS: Final[dict[str, list[Emitter]]] = {}


def vector(*opcodes: str) -> Callable[[Emitter], Emitter]:
    """Declare ``f(body, instruction, *sources) -> Value | tuple | None`` for `opcodes`.

    None says that the function does not know this form; nothing that it then leaves in the body is used.
    Where several share an opcode the first that knows the form is taken.
    """

    def declare(emitter: Emitter) -> Emitter:
        for opcode in opcodes:
            EMITTERS.setdefault(opcode, []).append(emitter)
        return emitter

    return declare


@cache
def load() -> None:
    """Import every file of definitions."""
    for name in ("integer", "moves", "floating"):
        importlib.import_module(f"attn4.emulator.vector.{name}")


def emit(body: Body, operation: Operation, sources: list[Value]) -> tuple[Value, ...] | None:
    """The results of an operation, one a destination; None where no definition knows it."""
    load()
    for emitter in EMITTERS.get(operation.instruction.opcode, ()):
        results: Results = emitter(body, operation.instruction, *sources)
        if results is not None:
            found = results if isinstance(results, tuple) else (results,)
            return found if len(found) == len(operation.destinations) else None
    return None


_known: dict[tuple[object, ...], bool] = {}


def known(operation: Operation) -> bool:
    """Whether `emit` knows an operation."""
    if operation.effect:
        return False
    i = operation.instruction
    if any(isinstance(operand, SpecialRegister) and operand.name in VARYING for operand in operation.sources):
        return False
    default = i.opcode not in APPROXIMATIONS or is_default(i.opcode)
    key = (
        i.opcode,
        i.modifiers,
        default,
        *map(_kind, operation.destinations),
        None,
        *map(_kind, operation.sources),
    )
    if key not in _known:
        widths = source_widths(operation)
        _known[key] = widths is not None and _tried(operation, widths)
    return _known[key]


def source_widths(operation: Operation) -> list[int] | None:
    """Bits of each source's value; None where one has no width that vectors are made of."""
    widths: list[int] = []
    for operand, value in zip(operation.sources, operation.constants, strict=True):
        match operand:
            case Immediate():
                assert value is not None
                bits = 1 if value.dtype == bool else value.itemsize * 8
            case Register() | SpecialRegister():
                bits = WIDTHS[operand.type]
            case Negated():
                bits = WIDTHS[operand.register.type]
            case Symbol():
                bits = 32 if _narrow(operation.instruction) else 64
            case _:
                return None
        if bits > 64:
            return None
        widths.append(bits)
    return widths


def _narrow(i: Instruction) -> bool:
    return bool(i.modifiers) and i.modifiers[-1] in ("b32", "u32", "s32")


def _tried(operation: Operation, widths: list[int]) -> bool:
    body = Body()
    sources = [
        Value(bits, integer=f"%x{n}") if given is None else constant(int(given[0]), bits)
        for n, (bits, given) in enumerate(zip(widths, operation.constants, strict=True))
    ]
    results = emit(body, operation, sources)
    if results is None:
        return False
    return all(
        not isinstance(operand, Register) or WIDTHS[operand.type] == result.bits
        for operand, result in zip(operation.destinations, results, strict=True)
    )


def _kind(operand: Operand) -> object:
    match operand:
        case Register():
            return operand.type
        case Immediate():
            return operand.value
        case Sink():
            return "_"
        case SpecialRegister():
            return "special", operand.type
    return type(operand).__name__
