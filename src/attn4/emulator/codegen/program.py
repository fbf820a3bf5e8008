"""A kernel ready to execute: generated code, its functions and constants; compiled code is kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from attn4.emulator.codegen.emit import Source, emit
from attn4.emulator.codegen.segments import Segment, cut, local_registers, numbered
from attn4.emulator.isa.registry import BLOCKED
from attn4.emulator.ptx.module import Instruction, Kernel, Register

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
        Instructions of each segment.
    registers
        In the order of a warp's list of registers.
    amounts
        What one visit of a segment adds to which class of a report, of those that were asked for.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.instructions: tuple[Instruction, ...] = tuple(kernel.instructions)
        self.segments: tuple[Segment, ...] = cut(kernel)
        self.sizes = [segment.size for segment in self.segments]
        places = numbered(kernel)
        self.registers: tuple[Register, ...] = tuple(places)
        source = emit(self.segments, places, local_registers(self.segments))
        self._lines = source.instructions
        self.filename = f"<ptx {kernel.name[:40]}>"
        self._code = _compiled(source, self.filename)
        self._functions: dict[int, Functions] = {}
        self.amounts: dict[int, Mapping[str, float]] = {}

    def functions(self, lanes: int) -> Functions:
        """The functions for registers of ``lanes`` elements, constants spread to that width."""
        known = self._functions.get(lanes)
        if known is None:
            known = self._functions[lanes] = self._bound(lanes)
        return known

    def instruction_at(self, line: int) -> Instruction | None:
        """The instruction that a line of the generated source executes."""
        number = self._lines[line - 1] if 0 < line <= len(self._lines) else -1
        return self.instructions[number] if number >= 0 else None

    def _bound(self, lanes: int) -> Functions:
        names: dict[str, Any] = {"where": np.where, "ONE": b"\x01", "BLOCKED": BLOCKED}
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


_KEPT = 64
_by_identity: dict[int, tuple[Kernel, Program]] = {}


def program(kernel: Kernel) -> Program:
    """The program of a kernel record, made once as long as it is among the last used."""
    entry = _by_identity.get(id(kernel))
    if entry is None or entry[0] is not kernel:
        entry = _by_identity[id(kernel)] = (kernel, Program(kernel))
        if len(_by_identity) > _KEPT:
            del _by_identity[next(iter(_by_identity))]
    return entry[1]


def _compiled(source: Source, filename: str) -> CodeType:
    """Compile generated source, or load what an earlier process compiled from the same text."""
    text = source.text
    key = hashlib.sha256(importlib.util.MAGIC_NUMBER + filename.encode() + b"\0" + text.encode()).hexdigest()
    path = cache_folder() / f"{key[:40]}.code"
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
        if path.stat().st_uid != os.getuid():
            raise OSError("code that another user wrote is not executed")
        code = marshal.loads(path.read_bytes())
        if isinstance(code, CodeType):
            return code
    code = compile(text, filename, "exec", optimize=2)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(marshal.dumps(code))
        Path(name).replace(path)
    return code


def cache_folder() -> Path:
    """Where compiled code is kept: ``attn4/emulator`` under the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "attn4" / "emulator"
