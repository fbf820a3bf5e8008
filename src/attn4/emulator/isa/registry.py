"""One definition an instruction: how definitions are declared, found, and bound to a parsed instruction.

A definition is a *builder*. It looks at one parsed instruction, refuses whatever it does not know, and
returns the function that runs at each execution. Two kinds:

``@pure(opcode)``
    ``f(*sources) -> result`` or a tuple of results. Nothing but the sources is read, nothing but the results
    written; all lanes are computed, and the engine merges the results under the guard and the divergence
    mask.
``@effect(opcode)``
    ``f(warp, mask, *sources) -> result(s) | None | BLOCKED``. ``mask`` is the bool array of active lanes.
    ``BLOCKED`` means that nothing was done and the instruction is to be tried again later.

Sources and results are contiguous numpy arrays of shape (lanes,), lanes any multiple of 32: bool for
predicates, uint8/uint16/uint32/uint64 raw bits for the rest. `bind` says which operands are written and
which are read, in the order of the function's arguments; an immediate comes with its bits already in the
width that the definition reads. The engine runs definitions under ``numpy.errstate(all="ignore")``:
warnings, not results, depend on it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from attn4.emulator.ptx.errors import UnsupportedError
from attn4.emulator.ptx.module import (
    Address,
    Immediate,
    Instruction,
    Operand,
    PairDestination,
    Register,
    Vector,
)

Array: TypeAlias = npt.NDArray[Any]
Function: TypeAlias = Callable[..., Any]
Builder: TypeAlias = Callable[[Instruction], Function]
Types: TypeAlias = tuple[str, ...]


class _Blocked(Enum):
    BLOCKED = "blocked"

    def __repr__(self) -> str:
        return "BLOCKED"


BLOCKED: Final = _Blocked.BLOCKED
"""What a waiting definition returns when it cannot proceed."""

CARRY: Final = Register("%CC.CF", "pred", "pred")
"""The carry flag (PTX 9.7.2): ``.cc`` writes it, ``addc``, ``subc``, ``madc`` read it, like a register."""

INTEGER: Final = frozenset({f"{kind}{bits}" for kind in "su" for bits in (16, 32, 64)} | {"u16x2", "s16x2"})
FLOATING: Final = frozenset({"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"})
BITS: Final = frozenset({"pred", "b16", "b32", "b64"})

WIDTHS: Final = {f"{kind}{bits}": bits for kind in "bsu" for bits in (8, 16, 32, 64)} | {
    "b128": 128,
    "pred": 1,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "tf32": 32,
    "f64": 64,
    "f16x2": 32,
    "bf16x2": 32,
    "u16x2": 32,
    "s16x2": 32,
    "f32x2": 64,
    "e4m3": 8,
    "e5m2": 8,
    "e4m3x2": 16,
    "e5m2x2": 16,
    "e2m1x2": 8,
    "e2m3x2": 16,
    "e3m2x2": 16,
    "ue8m0x2": 16,
}
"""Bits that a value of each type takes in a register."""


class Spread(dict[int, Array]):
    """A constant as arrays of as many elements as asked for, each made once: ``zero[len(x)]``.

    An operation on arrays of one shape takes 0.3 us, on an array and a scalar, or one of shape (1,), 0.7 us.
    """

    def __init__(self, value: float, dtype: npt.DTypeLike) -> None:
        super().__init__()
        self._value = np.array(value, dtype)

    def __missing__(self, elements: int) -> Array:
        array = np.full(elements, self._value)
        array.flags.writeable = False
        self[elements] = array
        return array


class UnsupportedInstruction(UnsupportedError):  # noqa: N818
    """An opcode, modifier, type or operand without a definition; the message names it and where it stands."""

    def __init__(self, i: Instruction, reason: str) -> None:
        where = f" ({i.source})" if i.source is not None else ""
        super().__init__(f"{i.name}{where}: {reason}", i.line)
        self.instruction = i


class Modifiers:
    """The modifiers of one instruction, taken one by one; what no one took is an error."""

    def __init__(self, i: Instruction, left: Iterable[str] | None = None) -> None:
        """``left``: those that are to be taken, if not all of them."""
        self._instruction = i
        self._left = list(i.modifiers if left is None else left)

    def flag(self, name: str) -> bool:
        """Take `name` if it is there."""
        if name not in self._left:
            return False
        self._left.remove(name)
        return True

    def one_of(self, *names: str, default: str | None = None) -> str:
        """Take the first modifier that is one of `names`; else `default`, and without one an error."""
        for name in self._left:
            if name in names:
                self._left.remove(name)
                return name
        if default is None:
            raise UnsupportedInstruction(self._instruction, f"one of {_listed(names)} is needed")
        return default

    def done(self) -> None:
        """Refuse whatever was not taken."""
        if self._left:
            raise UnsupportedInstruction(
                self._instruction, f"modifier {_listed(self._left)} is not known here"
            )


@dataclass(frozen=True, slots=True)
class Definition:
    """One instruction of the machine.

    Attributes
    ----------
    opcode
        First word of the instruction.
    build
        Checks an instruction and returns the function that executes it.
    effect
        Whether the function takes (warp, mask) before its sources.
    kinds
        Types (the last among the modifiers) that it is for, where several definitions share an opcode.
    destinations
        How many leading operands are written, or a function of the instruction that says it.
    types
        Type of each source, flattened, for the width of immediates: a tuple, of which the last entry
        repeats, or a function of the instruction; "T" stands for the last type among the modifiers.
    form
        First modifier of the instructions that it is for, where that makes another instruction of the opcode.
    """

    opcode: str
    build: Builder
    effect: bool
    kinds: frozenset[str] | None = None
    destinations: int | Callable[[Instruction], int] = 1
    types: Types | Callable[[Instruction], Types] = ("T",)
    form: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """An instruction bound to its definition: all that an engine needs to execute it.

    Attributes
    ----------
    instruction
        What was bound.
    function
        ``f(*sources)`` or, for an effect, ``f(warp, mask, *sources)``.
    effect
        Which of the two.
    destinations
        One Register or Sink a result, in order; `CARRY` last where the carry flag is written. With one
        destination the function returns an array, with several a tuple, with none None.
    sources
        One operand an argument; a Negated one is read inverted. An Address stands for its base followed by
        its tensor coordinates; `CARRY` comes last where the carry flag is read.
    constants
        Beside each source the value of an immediate, shape (1,) in the dtype of the argument, to be spread
        over the lanes once; None for what is not an immediate.
    """

    instruction: Instruction
    function: Function
    effect: bool
    destinations: tuple[Operand, ...]
    sources: tuple[Operand, ...]
    constants: tuple[Array | None, ...]


DEFINITIONS: Final[dict[str, list[Definition]]] = {}


def pure(
    *opcodes: str,
    kinds: frozenset[str] | None = None,
    destinations: int | Callable[[Instruction], int] = 1,
    types: Types | Callable[[Instruction], Types] = ("T",),
) -> Callable[[Builder], Builder]:
    """Declare the definition of `opcodes` as a function of its sources alone; see `Definition`."""
    return _declaration(
        lambda opcode, build: Definition(opcode, build, False, kinds, destinations, types), opcodes
    )


def effect(
    *opcodes: str,
    kinds: frozenset[str] | None = None,
    destinations: int | Callable[[Instruction], int] = 1,
    types: Types | Callable[[Instruction], Types] = ("T",),
    form: str = "",
) -> Callable[[Builder], Builder]:
    """Declare the definition of `opcodes` as one that sees the warp and active lanes; see `Definition`."""
    return _declaration(
        lambda opcode, build: Definition(opcode, build, True, kinds, destinations, types, form), opcodes
    )


class WithRows:
    """The function of an effect with a long vector of registers among its operands, in two forms.

    Called as any other; or ``rows(warp, mask, registers, *others)``, the vector's registers being the rows of
    one array, which are read or, of a destination, written for the active lanes.
    """

    __slots__ = ("_function", "rows")

    def __init__(self, function: Function, rows: Function) -> None:
        self._function = function
        self.rows = rows

    def __call__(self, *arguments: Any) -> Any:
        """The function."""
        return self._function(*arguments)


def _declaration(
    define: Callable[[str, Builder], Definition], opcodes: tuple[str, ...]
) -> Callable[[Builder], Builder]:
    def declare(build: Builder) -> Builder:
        for opcode in opcodes:
            _add(define(opcode, build))
        return build

    return declare


def _add(definition: Definition) -> None:
    same = DEFINITIONS.setdefault(definition.opcode, [])
    for other in same:
        if definition.form != other.form:
            continue
        if definition.kinds is None or other.kinds is None or definition.kinds & other.kinds:
            raise ValueError(f"{definition.opcode} is defined twice")
    same.append(definition)


@cache
def load() -> None:
    """Import every chapter of this package, so that all definitions are known."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{package}.{module.name}")


def find(i: Instruction) -> Definition:
    """The definition of an instruction; `UnsupportedInstruction` where there is none."""
    if i.opcode not in DEFINITIONS:
        load()
    candidates = DEFINITIONS.get(i.opcode)
    if not candidates:
        raise UnsupportedInstruction(i, f"opcode {i.opcode} is not known")
    for definition in candidates:
        if definition.form and i.modifiers[:1] == (definition.form,):
            return definition
    for definition in candidates:
        if definition.form:
            continue
        if definition.kinds is None or value_type(i) in definition.kinds:
            return definition
    raise UnsupportedInstruction(i, f"type {value_type(i)} is not known here")


def bind(i: Instruction) -> Operation:
    """Find the definition of an instruction and let it build.

    Raises
    ------
    UnsupportedInstruction
        Opcode, modifier, type or operand without a definition.
    """
    definition = find(i)
    function = definition.build(i)
    written = definition.destinations
    count = written if isinstance(written, int) else written(i)
    destinations = tuple(flatten(i.operands[:count]))
    sources = tuple(flatten(i.operands[count:]))
    if "cc" in i.modifiers:
        destinations += (CARRY,)
    if i.opcode in ("addc", "subc", "madc"):
        sources += (CARRY,)
    declared = definition.types
    types = declared if isinstance(declared, tuple) else declared(i)
    constants = tuple(
        constant(i, operand, types[min(n, len(types) - 1)]) if isinstance(operand, Immediate) else None
        for n, operand in enumerate(sources)
    )
    return Operation(i, function, definition.effect, destinations, sources, constants)


def flatten(operands: Iterable[Operand]) -> Iterable[Operand]:
    """Registers, immediates and symbols of `operands` in order, vectors, pairs and addresses opened."""
    for operand in operands:
        if isinstance(operand, Vector):
            yield from flatten(operand.items)
        elif isinstance(operand, PairDestination):
            yield from (operand.first, operand.second)
        elif isinstance(operand, Address):
            yield operand.base
            yield from flatten(operand.coordinates)
        else:
            yield operand


def value_type(i: Instruction) -> str:
    """The last type among the modifiers: that of the operands, unless a definition says otherwise."""
    for modifier in reversed(i.modifiers):
        if modifier in WIDTHS:
            return modifier
    raise UnsupportedInstruction(i, "a type is needed")


def operand_count(i: Instruction, *allowed: int) -> int:
    """How many operands stand there, refused unless one of `allowed`."""
    if len(i.operands) not in allowed:
        raise UnsupportedInstruction(i, f"{len(i.operands)} operands, {_listed(map(str, allowed))} expected")
    return len(i.operands)


def immediate(i: Instruction, operand: Operand) -> int:
    """The bits of an operand that must be an immediate, such as lop3's table."""
    if not isinstance(operand, Immediate):
        raise UnsupportedInstruction(i, f"{operand.text} must be an immediate")
    return operand.value


def constant(i: Instruction, operand: Immediate, kind: str) -> Array:
    """An immediate as an array of shape (1,) in the dtype of a register of `kind` ("T": the
    instruction's).
    """
    if kind == "T":
        kind = value_type(i)
    bits = WIDTHS[kind]
    if kind == "pred":
        return np.array([operand.value != 0])
    if bits > 64:
        raise UnsupportedInstruction(i, f"an immediate of type {kind}")
    try:
        value = operand.bits(bits, floating=kind in ("f32", "f64", "tf32"))
    except ValueError as error:
        raise UnsupportedInstruction(i, str(error)) from None
    return np.array([value], f"u{bits // 8}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
