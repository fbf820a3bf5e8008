"""A parsed PTX module as typed, frozen records.

Names are unique within a kernel: a register, label or variable of a nested ``{ }`` scope whose name is taken
gets a suffix. A register is one object, shared by the instructions of its kernel.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the program that was compiled; ``inlined_at`` is the call that brought it here."""

    file: str
    line: int
    inlined_at: SourceLocation | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Register:
    """A register: ``type`` is its storage (pred b16 b32 b64 b128), ``declared`` the type as written."""

    name: str
    type: str
    declared: str

    @property
    def text(self) -> str:
        """The register as it stands in PTX."""
        return self.name


@dataclass(frozen=True, slots=True)
class SpecialRegister:
    """A read-only register of the machine, such as ``%tid.x``; ``type`` is b32, b64 or pred."""

    name: str
    type: str

    @property
    def text(self) -> str:
        """The register as it stands in PTX."""
        return self.name


@dataclass(frozen=True, slots=True)
class Negated:
    """A predicate read as its opposite: ``!%p1``."""

    register: Register

    @property
    def text(self) -> str:
        """The operand as it stands in PTX."""
        return f"!{self.register.name}"


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant as raw bits. ``type`` says how it was written.

    ``s64`` or ``u64``: an integer, ``value`` in [0, 2**64), negative ones in two's complement. ``f32``:
    ``0f`` and 8 digits. ``f64``: ``0d`` and 16 digits, or a decimal number.
    """

    value: int
    type: str

    def bits(self, width: int, *, floating: bool = False) -> int:
        """The constant as an operand of ``width`` bits; PTX 4.5.

        An integer is truncated; a double in a ``floating`` operand of 32 bits is rounded to nearest even.
        Anything else that does not fit raises ``ValueError``: an integer in a floating operand, a float in a
        narrower one.
        """
        if self.type in ("s64", "u64"):
            if floating:
                raise ValueError(f"the integer {self.text} stands where a floating-point constant belongs")
            return self.value & (1 << width) - 1
        written = 32 if self.type == "f32" else 64
        if width == written:
            return self.value
        if floating and width == 32:
            return _single(self.value)
        raise ValueError(f"the {written}-bit constant {self.text} does not fit an operand of {width} bits")

    @property
    def text(self) -> str:
        """The constant in PTX: floats as hexadecimal digits, integers in decimal."""
        if self.type == "f32":
            return f"0f{self.value:08X}"
        if self.type == "f64":
            return f"0d{self.value:016X}"
        if self.type == "u64":
            return f"{self.value}U"
        return str(self.value - 2**64 if self.value >> 63 else self.value)


def _single(double: int) -> int:
    (value,) = struct.unpack("<d", struct.pack("<Q", double))
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return int.from_bytes(packed, "little")


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a parameter or variable, ``offset`` bytes further on."""

    name: str
    offset: int = 0

    @property
    def text(self) -> str:
        """The symbol as it stands in PTX."""
        return f"{self.name}{self.offset:+d}" if self.offset else self.name


@dataclass(frozen=True, slots=True)
class Label:
    """A place in the kernel (``Kernel.labels``), or a list of them (``Kernel.branch_targets``)."""

    name: str

    @property
    def text(self) -> str:
        """The label as it stands in PTX."""
        return self.name


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a result that is dropped."""

    @property
    def text(self) -> str:
        """The sink as it stands in PTX."""
        return "_"


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Register | SpecialRegister | Immediate | Symbol | Sink, ...]

    @property
    def text(self) -> str:
        """The vector as it stands in PTX."""
        return "{" + ", ".join(item.text for item in self.items) + "}"


@dataclass(frozen=True, slots=True)
class Address:
    """``[base+offset]``; ``coordinates`` is what follows a comma in the brackets, as in a tensor's address.

    ``offset`` is a signed number of bytes.
    """

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()

    @property
    def text(self) -> str:
        """The address as it stands in PTX."""
        first = f"{self.base.text}{self.offset:+d}" if self.offset else self.base.text
        return "[" + ", ".join([first, *(item.text for item in self.coordinates)]) + "]"


@dataclass(frozen=True, slots=True)
class PairDestination:
    """``d|p``: a result and the predicate that comes with it."""

    first: Register | Sink
    second: Register | Sink

    @property
    def text(self) -> str:
        """The pair as it stands in PTX."""
        return f"{self.first.text}|{self.second.text}"


Operand: TypeAlias = (
    Register
    | SpecialRegister
    | Negated
    | Immediate
    | Symbol
    | Label
    | Sink
    | Vector
    | Address
    | PairDestination
)


@dataclass(frozen=True, slots=True)
class Guard:
    """``@p`` or ``@!p``: the lanes that take part."""

    register: Register
    negated: bool = False

    @property
    def text(self) -> str:
        """The guard as it stands in PTX."""
        return f"@{'!' if self.negated else ''}{self.register.name}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: ``opcode`` is its first dot-free word, ``modifiers`` the others without their dots.

    ``line`` counts from 1 in the PTX text. Where the instruction stands plays no part in equality.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None = None
    line: int = field(default=0, compare=False)
    source: SourceLocation | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Opcode and modifiers, such as ``add.s32``."""
        return ".".join((self.opcode, *self.modifiers))

    @property
    def text(self) -> str:
        """The instruction in PTX; it parses to an equal record."""
        guard = f"{self.guard.text} " if self.guard else ""
        operands = ", ".join(operand.text for operand in self.operands)
        return f"{guard}{self.name}{' ' if operands else ''}{operands};"


@dataclass(frozen=True, slots=True)
class Param:
    """A kernel parameter: ``size``, ``align`` and ``offset`` (from the first parameter) in bytes."""

    name: str
    type: str
    align: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in memory: ``space`` is shared, global, const or local; ``align`` and ``size`` in bytes.

    ``size`` is 0 for an ``extern`` array without bounds, as dynamic shared memory is declared. ``initial``
    holds the bytes given, which may be fewer than ``size``: the rest is zero. None: nothing is said.
    """

    name: str
    space: str
    type: str
    align: int
    size: int
    initial: bytes | None = None
    extern: bool = False


@dataclass(frozen=True, slots=True)
class BasicBlock:
    """Instructions that run one after another; only the last may branch.

    ``successors`` are indices into ``Kernel.blocks``, the target of a branch before the block that follows;
    empty where the thread ends. ``dominator`` and ``post_dominator`` are the immediate ones: None for the
    entry and blocks that are never reached, and for blocks whose paths meet nowhere before the end.
    """

    index: int
    label: str | None
    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]
    dominator: int | None
    post_dominator: int | None


@dataclass(frozen=True, slots=True)
class Launch:
    """What an entry demands of its launch; None where nothing is said. Shapes are (x, y, z)."""

    reqntid: tuple[int, int, int] | None = None
    maxntid: tuple[int, int, int] | None = None
    minnctapersm: int | None = None
    maxnreg: int | None = None
    explicitcluster: bool = False
    reqnctapercluster: tuple[int, int, int] | None = None
    maxclusterrank: int | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """An entry of a module.

    ``registers`` are those that its instructions name, in the order of first use. ``shared`` and ``local``
    are the variables it declares or names. ``labels`` gives the block that a label starts; ``branch_targets``
    the labels that a list for ``brx.idx`` holds.
    """

    name: str
    params: tuple[Param, ...]
    blocks: tuple[BasicBlock, ...]
    registers: tuple[Register, ...]
    shared: tuple[Variable, ...]
    local: tuple[Variable, ...]
    launch: Launch
    labels: Mapping[str, int]
    branch_targets: Mapping[str, tuple[str, ...]]
    line: int

    @property
    def instructions(self) -> Iterator[Instruction]:
        """All instructions, in the order of the text."""
        for block in self.blocks:
            yield from block.instructions

    @property
    def param_bytes(self) -> int:
        """The size of the parameters together."""
        return max((param.offset + param.size for param in self.params), default=0)


@dataclass(frozen=True, slots=True)
class Module:
    """A PTX file for ``target`` such as sm_100a; ``globals`` are in global or constant memory."""

    target: str
    version: tuple[int, int]
    kernels: tuple[Kernel, ...]
    globals: tuple[Variable, ...]

    def kernel(self, name: str) -> Kernel:
        """The kernel called ``name``; ``KeyError`` says which there are."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        known = ", ".join(kernel.name for kernel in self.kernels)
        raise KeyError(f"no kernel {name}; the module has {known or 'none'}")
