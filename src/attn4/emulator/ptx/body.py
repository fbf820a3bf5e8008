"""The body of an entry: cut into statements, then looked up, as a branch may name a label that follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from attn4.emulator.ptx import declarations
from attn4.emulator.ptx.errors import PtxError, UnsupportedError
from attn4.emulator.ptx.graph import basic_blocks
from attn4.emulator.ptx.module import Instruction, Kernel, Label, Launch, Param, SourceLocation, Variable
from attn4.emulator.ptx.operands import instruction
from attn4.emulator.ptx.scan import IDENTIFIER, STATEMENT, Source, split
from attn4.emulator.ptx.scope import Names, Scope

_NEXT = re.compile(
    rf"""\s*(?:
      (?P<open>\{{)
    | (?P<close>\}})
    | (?P<label>{IDENTIFIER})\s*:(?!:)
    | \.loc\b(?P<loc>[^\n;]*)
    | (?P<statement>{STATEMENT});
    )""",
    re.VERBOSE | re.ASCII,
)
_LOC = re.compile(
    r"""\s*(\d{1,9})\s+(\d{1,9})\s+\d{1,9}\s*
    (?:,\s*function_name\s+[^,]*,\s*inlined_at\s+(\d{1,9})\s+(\d{1,9})\s+\d{1,9}\s*)?""",
    re.VERBOSE | re.ASCII,
)
_LIST = re.compile(r"\.branchtargets\s(?P<names>.*)", re.DOTALL)
_DIRECTIVE = re.compile(r"(?:\.(?:extern|visible|weak|common)\s+)*\.(\w+)", re.ASCII)
_VARIABLES = ("shared", "local", "global", "const", "param")


@dataclass(frozen=True, slots=True)
class Entry:
    """What precedes a body: its name, parameters, demands on the launch and line."""

    name: str
    params: tuple[Param, ...]
    launch: Launch
    line: int


class _Statement(NamedTuple):
    text: str
    line: int
    scope: Scope
    loc: tuple[int, ...]


class _List(NamedTuple):
    """A ``.branchtargets`` statement: the labels named in ``text``."""

    text: str
    line: int
    scope: Scope


@dataclass(slots=True)
class Body:
    """An entry cut into statements; ``outside`` are the variables that the module declares before it."""

    entry: Entry
    outside: tuple[Variable, ...]
    items: list[_Statement | Label] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    variables: list[Variable] = field(default_factory=list)
    lists: dict[str, _List] = field(default_factory=dict)
    root: Scope = field(init=False)

    def __post_init__(self) -> None:
        self.root = Scope(self.names)
        for name in [variable.name for variable in self.outside] + [
            param.name for param in self.entry.params
        ]:
            self.root.declare_variable(name, self.entry.line)

    def cut(self, source: Source, position: int) -> int:
        """Read statements from behind the opening brace to the one that closes it; the position behind it."""
        scope = Scope(self.names, self.root)
        top = scope
        loc: tuple[int, ...] = ()
        for match in _matches(source, position):
            kind = match.lastgroup
            line = source.line(match.start(kind or 0))
            if kind == "statement":
                self._statement(_Statement(match[kind].rstrip(), line, scope, loc))
            elif kind == "loc":
                loc = _location(match[kind], line)
            elif kind == "label":
                self.items.append(scope.declare_label(match[kind], line))
            elif kind == "open":
                scope = Scope(self.names, scope)
            elif scope is top:
                return match.end()
            else:
                assert scope.parent is not None
                scope = scope.parent
        raise PtxError(f"the body of {self.entry.name[:80]} does not end", source.last_line)

    def _statement(self, found: _Statement) -> None:
        text, line, scope, _ = found
        if not text.startswith("."):
            if text:
                self.items.append(found)
            return
        directive = _DIRECTIVE.match(text)
        name = directive[1] if directive else ""
        if name == "reg":
            scope.declare_registers(text, line)
        elif name in _VARIABLES:
            self._variables(text, line, scope)
        elif name == "branchtargets":
            self._list(found)
        elif name in ("calltargets", "callprototype"):
            raise UnsupportedError(f"a call through .{name}", line)
        elif name != "pragma":
            raise PtxError(f"the directive {text[:80].split()[0]} in the body of an entry", line)

    def _variables(self, text: str, line: int, scope: Scope) -> None:
        for variable in declarations.variables(text, line):
            if variable.space not in ("shared", "local"):
                raise UnsupportedError(f"a .{variable.space} variable in the body of an entry", line)
            symbol = scope.declare_variable(variable.name, line)
            self.variables.append(declarations.renamed(variable, symbol.name))

    def _list(self, found: _Statement) -> None:
        match = _LIST.fullmatch(found.text)
        label = self.items.pop() if self.items else None
        if match is None or not isinstance(label, Label):
            raise PtxError("a list of labels without a name", found.line)
        self.lists[label.name] = _List(match["names"], found.line, found.scope)

    def kernel(self, files: dict[int, str]) -> Kernel:
        """The finished record, with the source ``files`` of the module by their numbers."""
        where = _Locations(files)
        items: list[Instruction | Label] = []
        for item in self.items:
            if isinstance(item, Label):
                items.append(item)
            else:
                text, line, scope, loc = item
                items.append(instruction(text, scope, line, where(loc, line) if loc else None))
        targets = {name: _labels(found) for name, found in self.lists.items()}
        blocks, labels = basic_blocks(items, targets)
        used = [variable for variable in self.outside if variable.name in self.names.symbols]
        declared = used + self.variables
        return Kernel(
            name=self.entry.name,
            params=self.entry.params,
            blocks=blocks,
            registers=tuple(self.names.registers.values()),
            shared=tuple(variable for variable in declared if variable.space == "shared"),
            local=tuple(variable for variable in declared if variable.space == "local"),
            launch=self.entry.launch,
            labels=labels,
            branch_targets=targets,
            line=self.entry.line,
        )


def _matches(source: Source, position: int) -> Iterator[re.Match[str]]:
    text = source.text
    match: Callable[[str, int], re.Match[str] | None] = _NEXT.match
    while found := match(text, position):
        yield found
        position = found.end()


def _location(text: str, line: int) -> tuple[int, ...]:
    match = _LOC.fullmatch(text)
    if match is None:
        raise PtxError(f"no source location: .loc{text[:80]}", line)
    return tuple(int(number) for number in match.groups() if number)


def _labels(found: _List) -> tuple[str, ...]:
    names = []
    for name in split(found.text, found.line):
        label = found.scope.find(name)
        if not isinstance(label, Label):
            raise PtxError(f"{name[:80]} is no label", found.line)
        names.append(label.name)
    return tuple(names)


class _Locations:
    """``SourceLocation`` of the numbers in ``.loc``: file and line, and those of the call where inlined."""

    def __init__(self, files: dict[int, str]) -> None:
        self._files = files
        self._known: dict[tuple[int, ...], SourceLocation] = {}

    def __call__(self, loc: tuple[int, ...], line: int) -> SourceLocation:
        known = self._known.get(loc)
        if known is None:
            outer = self(loc[2:], line) if len(loc) > 2 else None
            if loc[0] not in self._files:
                raise PtxError(f"the source file {loc[0]} is not declared", line)
            known = self._known[loc] = SourceLocation(self._files[loc[0]], loc[1], outer)
        return known
