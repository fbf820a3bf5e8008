"""The body of an entry: cut into statements, then looked up, as a branch may name a label that follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from attn4.emulator.ptx import declarations
from attn4.emulator.ptx.errors import PtxError, UnsupportedError
from attn4.emulator.ptx.functions import SYSTEM, Call, Function, Parameter, call
from attn4.emulator.ptx.graph import basic_blocks
from attn4.emulator.ptx.module import (
    Address,
    Guard,
    Immediate,
    Instruction,
    Kernel,
    Label,
    Launch,
    Negated,
    Param,
    Register,
    SourceLocation,
    Symbol,
    Variable,
)
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
_RETURN = re.compile(rf"(?P<guard>@\s*!?\s*{IDENTIFIER}\s+)?ret(?:\.uni)?", re.ASCII)
_IS_CALL = re.compile(rf"(?:@\s*!?\s*{IDENTIFIER}\s+)?call\b", re.ASCII)
_RETURN_LABEL = "$return"
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


@dataclass(slots=True)
class _Inside:
    """Where statements are read: in the function of this name; "" outside of functions."""

    function: str = ""
    outer: _Inside | None = None

    def calls(self, name: str) -> bool:
        """Whether the function of that name is being read."""
        return self.function == name or (self.outer is not None and self.outer.calls(name))


class _List(NamedTuple):
    """A ``.branchtargets`` statement: the labels named in ``text``."""

    text: str
    line: int
    scope: Scope


@dataclass(slots=True)
class Body:
    """An entry cut into statements; ``outside`` are the variables that the module declares before it.

    ``passed`` are the variables that hold the parameters of calls.
    """

    entry: Entry
    outside: tuple[Variable, ...]
    functions: Mapping[str, Function] = field(default_factory=dict)
    items: list[_Statement | Label] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    variables: list[Variable] = field(default_factory=list)
    lists: dict[str, _List] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    root: Scope = field(init=False)

    def __post_init__(self) -> None:
        self.root = Scope(self.names)
        for name in [variable.name for variable in self.outside] + [
            param.name for param in self.entry.params
        ]:
            self.root.declare_variable(name, self.entry.line)

    def cut(self, source: Source, position: int) -> int:
        """Read statements from behind the opening brace to the one that closes it; the position behind it."""
        return self._cut(source, position, Scope(self.names, self.root), _Inside())

    def _cut(self, source: Source, position: int, scope: Scope, inside: _Inside) -> int:
        top = scope
        loc: tuple[int, ...] = ()
        for match in _matches(source, position):
            kind = match.lastgroup
            line = source.line(match.start(kind or 0))
            if kind == "statement":
                found = _Statement(match[kind].rstrip(), line, scope, loc)
                if "call" in found.text and _IS_CALL.match(found.text):
                    self._call(source, found, inside)
                elif inside.function and (back := _RETURN.fullmatch(found.text)):
                    self.items.append(found._replace(text=f"{back['guard'] or ''}bra {_RETURN_LABEL}"))
                else:
                    self._statement(found)
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
            if variable.space not in ("shared", "local", "param"):
                raise UnsupportedError(f"a .{variable.space} variable in the body of an entry", line)
            symbol = scope.declare_variable(variable.name, line)
            if variable.space == "param":
                self.passed.add(symbol.name)
                variable = replace(variable, space="local")
            self.variables.append(declarations.renamed(variable, symbol.name))

    def _call(self, source: Source, found: _Statement, inside: _Inside) -> None:
        """Put the body of a function in the place of its call, or leave a call of a system function."""
        made = call(found.text, found.line)
        function = self.functions.get(made.name)
        if function is None:
            raise PtxError(f"the function {made.name[:80]} is not declared", found.line)
        if function.body is None:
            self._system_call(made, found)
            return
        if inside.calls(made.name):
            raise UnsupportedError(f"the function {made.name[:80]} calls itself", found.line)
        given = (len(made.results), len(made.arguments))
        if given != (len(function.results), len(function.params)):
            raise PtxError(f"a call of {made.name[:80]} with {given} results and arguments", found.line)
        scope = Scope(self.names, self.root)
        skip = found.scope.declare_label(f"$skip{len(self.items)}", found.line)
        if made.guard:
            opposite = made.guard[1:] if made.guard[0] == "!" else f"!{made.guard}"
            self.items.append(found._replace(text=f"@{opposite} bra $skip{len(self.items)}"))
        for parameter, argument in zip(function.params, made.arguments, strict=True):
            self._pass(parameter, argument, found, scope)
        for parameter, result in zip(function.results, made.results, strict=True):
            self._pass(parameter, result, found, scope, back=True)
        end = scope.declare_label(_RETURN_LABEL, found.line)
        self._cut(source, function.body, Scope(self.names, scope), _Inside(function.name, inside))
        self.items.append(end)
        for parameter in function.results:
            if parameter.register:
                hidden = f"$to_{parameter.name.lstrip('%')}"
                self.items.append(self._moved(parameter, hidden, parameter.name, found, scope))
        self.items.append(skip)

    def _pass(
        self, parameter: Parameter, given: str, found: _Statement, scope: Scope, *, back: bool = False
    ) -> None:
        """Let a parameter stand for what was passed: a variable itself, or a register of its own."""
        record = found.scope.find(given)
        if not parameter.register:
            if not isinstance(record, Symbol):
                raise PtxError(f"{given[:80]} is passed where a .param variable belongs", found.line)
            scope.alias(parameter.name, record, found.line)
            return
        scope.declare_registers(f".reg .{parameter.type} {parameter.name}", found.line)
        hidden = f"${'to' if back else 'from'}_{parameter.name.lstrip('%')}"
        if record is not None:
            scope.alias(hidden, record, found.line)
        if not back:
            source = hidden if record is not None else given
            self.items.append(self._moved(parameter, parameter.name, source, found, scope))

    def _moved(
        self, parameter: Parameter, target: str, source: str, found: _Statement, scope: Scope
    ) -> _Statement:
        return found._replace(text=f"mov.{parameter.type} {target}, {source}", scope=scope)

    def _system_call(self, made: Call, found: _Statement) -> None:
        """``call.name [result], [argument], ...``, with a guard."""
        if made.name not in SYSTEM:
            raise UnsupportedError(f"a call of {made.name[:80]}, which is not in the module", found.line)
        guard = f"@{made.guard} " if made.guard else ""
        names = ", ".join(f"[{name}]" for name in (*made.results, *made.arguments))
        self.items.append(found._replace(text=f"{guard}call.{made.name} {names}"))

    def _list(self, found: _Statement) -> None:
        match = _LIST.fullmatch(found.text)
        label = self.items.pop() if self.items else None
        if match is None or not isinstance(label, Label):
            raise PtxError("a list of labels without a name", found.line)
        self.lists[label.name] = _List(match["names"], found.line, found.scope)

    def _of_passed(self, i: Instruction) -> Instruction:
        """An access to a parameter of a call is one to the local variable that holds it."""
        if i.opcode not in ("ld", "st") or "param" not in i.modifiers:
            return i
        for operand in i.operands:
            if isinstance(operand, Address) and isinstance(operand.base, Symbol):
                if operand.base.name not in self.passed:
                    return i
                modifiers = tuple("local" if name == "param" else name for name in i.modifiers)
                return replace(i, modifiers=modifiers)
        return i

    def _opened(
        self, item: Instruction | Label, targets: Mapping[str, tuple[str, ...]]
    ) -> Iterator[Instruction | Label]:
        """A branch by an index is a comparison and a branch for each label; behind them it is a fault.

        PTX brx.idx: "Behavior is undefined if the value of index operand is greater than or equal to" the
        number of labels.
        """
        label = item.operands[-1] if isinstance(item, Instruction) and item.opcode == "brx" else None
        if not isinstance(item, Instruction) or not isinstance(label, Label) or label.name not in targets:
            yield item
            return
        guard = (item.guard.register,) if item.guard and not item.guard.negated else ()
        inverse = (Negated(item.guard.register),) if item.guard and item.guard.negated else ()
        joined = ("and",) if item.guard else ()
        for number, name in enumerate(targets[label.name]):
            chosen = Register(self.names.unique("%chosen"), "pred", "pred")
            self.names.registers[chosen.name] = chosen
            operands = (chosen, item.operands[0], Immediate(number, "s64"), *guard, *inverse)
            yield replace(
                item, opcode="setp", modifiers=("eq", *joined, "u32"), operands=operands, guard=None
            )
            branch = Guard(chosen, negated=False)
            yield replace(item, opcode="bra", modifiers=(), operands=(Label(name),), guard=branch)
        yield replace(item, opcode="trap", modifiers=(), operands=())

    def kernel(self, files: dict[int, str]) -> Kernel:
        """The finished record, with the source ``files`` of the module by their numbers."""
        where = _Locations(files)
        items: list[Instruction | Label] = []
        for item in self.items:
            if isinstance(item, Label):
                items.append(item)
            else:
                text, line, scope, loc = item
                made = instruction(text, scope, line, where(loc, line) if loc else None)
                items.append(self._of_passed(made) if self.passed else made)
        targets = {name: _labels(found) for name, found in self.lists.items()}
        if targets:
            items = [part for item in items for part in self._opened(item, targets)]
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
