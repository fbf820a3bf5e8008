"""A kernel ready to execute: generated code, its functions and constants; compiled code is kept on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np

from attn4.emulator.codegen import machine_code
from attn4.emulator.codegen.cache import keep, kept
from attn4.emulator.codegen.emit import Source, emit
from attn4.emulator.codegen.layout import Storage
from attn4.emulator.codegen.segments import Segment, cut, local_registers, numbered
from attn4.emulator.codegen.vectors import Vectors, emit_python
from attn4.emulator.hazards.registers import watched
from attn4.emulator.isa.registry import BLOCKED
from attn4.emulator.ptx.module import Instruction, Kernel, Register, Vector

Code = list[Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Functions:
    """One function a segment: for all lanes active, and for some of them."""

    full: Code
    some: Code


class Program:
    """A kernel as segments of generated code.

    Attributes
    ----------
    segments
        In the order of the text; the first is the entry.
    sizes
        Instructions of each segment, without what `hazards` puts in.
    registers
        In the order of a warp's list of registers.
    amounts
        What one visit of a segment adds to which class of a report, of those that were asked for.
    vectors
        How instructions that only compute are vector functions; None where all is Python.
    """

    def __init__(self, kernel: Kernel, *, hazards: bool = False, vectors: bool = False) -> None:
        self.kernel = kernel
        self.instructions: tuple[Instruction, ...] = tuple(kernel.instructions)
        self.segments: tuple[Segment, ...] = cut(kernel)
        self.sizes = [segment.size for segment in self.segments]
        if hazards:
            found = watched(kernel, self.segments)
            self.segments, self.instructions = found.segments, found.instructions
        places = numbered(kernel)
        self.registers: tuple[Register, ...] = tuple(places)
        self.vectors = Vectors.of(self.segments, watched=hazards) if vectors else None
        if self.vectors is None:
            source = emit(self.segments, places, local_registers(self.segments))
        else:
            source = emit_python(self.vectors, places)
        self._lines = source.instructions
        self.filename = f"<ptx {kernel.name[:40]}>"
        self._code = _compiled(source, self.filename)
        self._functions: dict[int, Functions] = {}
        self.amounts: dict[int, Mapping[str, float]] = {}
        self._free: dict[int, list[Storage]] = {}

    def functions(self, lanes: int) -> Functions:
        """The functions for registers of ``lanes`` elements, constants spread to that width."""
        known = self._functions.get(lanes)
        if known is None:
            known = self._functions[lanes] = self._bound(lanes)
        return known

    def storage(self, lanes: int) -> Storage | None:
        """Room for the registers of a group of warps; None where Python keeps them as arrays of its own."""
        if self.vectors is None:
            return None
        free = self._free.setdefault(lanes, [])
        if free:
            storage = free.pop()
            storage.poison()
            return storage
        storage = Storage(self.vectors.layout, lanes)
        touched = self.vectors.python
        storage.views = [storage.register(r) if r in touched else None for r in self.registers]
        storage.views += [storage.rows(rows) for rows in self.vectors.layout.rows]
        return storage

    def recycle(self, storage: Storage) -> None:
        """Take back the room of warps that have ended."""
        self._free[storage.lanes].append(storage)

    def instruction_at(self, line: int) -> Instruction | None:
        """The instruction that a line of the generated source executes."""
        number = self._lines[line - 1] if 0 < line <= len(self._lines) else -1
        return self.instructions[number] if number >= 0 else None

    def _bound(self, lanes: int) -> Functions:
        names: dict[str, Any] = {
            "where": np.where,
            "wide": _wide,
            "copyto": np.copyto,
            "ONE": b"\x01",
            "BLOCKED": BLOCKED,
        }
        if self.vectors is not None:
            names |= machine_code.compiled(self.vectors.llvm(lanes), self.vectors.names)
        for segment in self.segments:
            for number, operation in segment.operations:
                names[f"f{number}"] = operation.function
                for n, value in enumerate(operation.constants):
                    if value is not None:
                        spread = np.repeat(value, lanes)
                        spread.flags.writeable = False
                        names[f"k{number}_{n}"] = spread
        exec(self._code, names)
        return Functions(names["full"], names["some"])


def _wide(mask: Any, first: Any, second: Any) -> Any:
    """`numpy.where` of registers of two words a lane."""
    return np.where(mask[:, None], first, second)


_KEPT = 64
_by_identity: dict[tuple[int, bool, bool], tuple[Kernel, Program]] = {}


def program(kernel: Kernel, *, hazards: bool = False) -> Program:
    """The program of a kernel record, made once as long as it is among the last used.

    ``hazards``: with what looks for hazards of registers between its instructions, and a Watch told
    of every access to memory.
    """
    key = (id(kernel), hazards, machine_code.available())
    entry = _by_identity.get(key)
    if entry is None or entry[0] is not kernel:
        entry = _by_identity[key] = (kernel, Program(kernel, hazards=hazards, vectors=vectorised(kernel)))
        if len(_by_identity) > _KEPT:
            del _by_identity[next(iter(_by_identity))]
    return entry[1]


def vectorised(kernel: Kernel) -> bool:
    """Whether a kernel's computing instructions can run as vector functions here.

    Not with registers of 128 bits, nor with accumulators of wgmma that overlap others in part.
    """
    if not machine_code.available() or any(register.type == "b128" for register in kernel.registers):
        return False
    vectors = {
        operand.items
        for i in kernel.instructions
        for operand in i.operands[:1]
        if i.opcode == "wgmma" and isinstance(operand, Vector)
    }
    return len({register for vector in vectors for register in vector}) == sum(map(len, vectors))


def _compiled(source: Source, filename: str) -> CodeType:
    """Compile generated source, or load what an earlier process compiled from the same text."""
    text = source.text
    key = hashlib.sha256(importlib.util.MAGIC_NUMBER + filename.encode() + b"\0" + text.encode()).hexdigest()
    name = f"{key[:40]}.code"
    known = kept(name)
    if known is not None:
        code: CodeType = marshal.loads(known)
        return code
    code = compile(text, filename, "exec", optimize=2)
    keep(name, marshal.dumps(code))
    return code
