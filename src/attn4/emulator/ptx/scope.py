"""Names within a kernel: what each ``{ }`` declares, made unique."""

from __future__ import annotations

import re
from typing import TypeAlias

from attn4.emulator.ptx.errors import PtxError, UnsupportedError
from attn4.emulator.ptx.module import Label, Operand, Register, Symbol
from attn4.emulator.ptx.scan import IDENTIFIER, split

Named: TypeAlias = Register | Label | Symbol

_DIGITS = 9  # of the largest number of registers that one name may stand for
_STORAGE = {
    "pred": "pred",
    **dict.fromkeys(("b8", "u8", "s8"), "b8"),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), "b16"),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), "b32"),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), "b64"),
    "b128": "b128",
}
_REGISTERS = re.compile(
    r"\.reg\s*(?P<vector>\.v\d\s*)?\.(?P<type>\w+)\s+(?P<names>[^.].*)", re.DOTALL | re.ASCII
)
_RANGE = re.compile(rf"(?P<prefix>{IDENTIFIER})\s*(?:<\s*(?P<count>\d{{1,{_DIGITS}}})\s*>)?", re.ASCII)


class Names:
    """What one kernel has named so far: the names taken, the registers and symbols that instructions use."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self.registers: dict[str, Register] = {}
        self.symbols: set[str] = set()

    def unique(self, name: str) -> str:
        """``name``, with a suffix ``$n`` if something in the kernel has it already."""
        candidate = name
        while candidate in self._taken:
            self._taken[name] += 1
            candidate = f"{name}${self._taken[name]}"
        self._taken[candidate] = 0
        return candidate


class Scope:
    """The names of one ``{ }`` and, through ``parent``, those around it."""

    def __init__(self, names: Names, parent: Scope | None = None) -> None:
        self.names = names
        self.parent = parent
        self.operands: dict[str, Operand] = {}
        """Operands of this scope's instructions by their text."""
        self._declared: dict[str, Named] = {}
        self._ranges: dict[str, tuple[int, str]] = {}

    def _declare(self, name: str, record: Named, line: int) -> None:
        if name in self._declared:
            raise PtxError(f"{name} is declared twice in one scope", line)
        self._declared[name] = record

    def declare_registers(self, text: str, line: int) -> None:
        """Take in a ``.reg`` statement."""
        match = _REGISTERS.fullmatch(text)
        if match is None:
            raise PtxError("a .reg statement without a type or names", line)
        declared = match["type"]
        if match["vector"]:
            raise UnsupportedError("registers of vector type", line)
        if declared not in _STORAGE:
            raise PtxError(f"registers cannot be of type .{declared}", line)
        for item in split(match["names"], line):
            name = _RANGE.fullmatch(item)
            if name is None:
                raise PtxError(f"{item[:80]} is no register name", line)
            if name["count"]:
                if name["prefix"] in self._ranges:
                    raise PtxError(f"{item} is declared twice in one scope", line)
                self._ranges[name["prefix"]] = (int(name["count"]), declared)
            else:
                self._declare(item, self._register(item, declared), line)

    def _register(self, name: str, declared: str) -> Register:
        return Register(self.names.unique(name), _STORAGE[declared], declared)

    def declare_label(self, name: str, line: int) -> Label:
        """Take in a label that stands in this scope; the record has its unique name."""
        label = Label(self.names.unique(name))
        self._declare(name, label, line)
        return label

    def declare_variable(self, name: str, line: int) -> Symbol:
        """Take in a parameter or variable; the record has its unique name."""
        symbol = Symbol(self.names.unique(name))
        self._declare(name, symbol, line)
        return symbol

    def alias(self, name: str, record: Named, line: int) -> None:
        """Let ``name`` stand here for what is declared elsewhere."""
        self._declare(name, record, line)

    def find(self, name: str) -> Named | None:
        """The record that ``name`` stands for here; None if nothing around declares it."""
        scope: Scope | None = self
        while scope is not None:
            found = scope._declared.get(name) or scope._from_range(name)
            if found is not None:
                if isinstance(found, Register):
                    self.names.registers[found.name] = found
                elif isinstance(found, Symbol):
                    self.names.symbols.add(found.name)
                return found
            scope = scope.parent
        return None

    def _from_range(self, name: str) -> Register | None:
        if not self._ranges:
            return None
        digits = len(name)
        while 0 < digits > len(name) - _DIGITS and "0" <= name[digits - 1] <= "9":
            digits -= 1
            count, declared = self._ranges.get(name[:digits], (0, ""))
            number = name[digits:]
            if int(number) < count and (number == "0" or number[0] != "0"):
                register = self._register(name, declared)
                self._declared[name] = register
                return register
        return None
