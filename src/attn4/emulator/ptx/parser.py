"""PTX text to a ``Module``: entries and variables are taken in one by one, then names are looked up."""

from __future__ import annotations

import re

from attn4.emulator.ptx import declarations
from attn4.emulator.ptx.body import Body, Entry
from attn4.emulator.ptx.errors import PtxError, UnsupportedError
from attn4.emulator.ptx.functions import HEAD, Function, parameters
from attn4.emulator.ptx.module import Module, Variable
from attn4.emulator.ptx.scan import IDENTIFIER, STATEMENT, Source

_LINKAGE = r"(?:\.(?:visible|weak|extern|internal)\s+)*"
_NEXT = re.compile(
    rf"""\s*(?:
      \.(?P<header>(?:version|target|address_size)\b[^\n]*)
    | \.file\b(?P<file>[^\n]*)
    | (?P<section>\.section\b[^{{\n]*\{{?)
    | {_LINKAGE}\.entry\s+(?P<entry>{IDENTIFIER})\s*
    | {_LINKAGE}\.(?P<function>(?:func|alias)\b)
    | (?P<statement>{STATEMENT});
    )""",
    re.VERBOSE | re.ASCII,
)
_HEAD = re.compile(
    r"""(?:\((?P<params>[^(){};]*)\))?
    (?P<launch>(?:[^(){};"]|\.pragma\s*"[^"\n]*"\s*;)*)(?P<end>[{;])""",
    re.VERBOSE | re.ASCII,
)
_FILE = re.compile(r'\s*(\d{1,9})\s*"([^"]*)"(?:\s*,\s*\d+)*\s*', re.ASCII)
_VERSION = re.compile(r"version\s+(\d{1,4})\.(\d{1,4})\s*", re.ASCII)
_TARGET = re.compile(r"target\s+(\w+)(?:\s*,\s*\w+)*\s*", re.ASCII)
_BRACES = re.compile(r"[{}]")
_FUNCTION = re.compile(r"\.func\b", re.ASCII)


def parse(text: str) -> Module:
    """The module that ``text`` holds; ``PtxError`` with a line if it is not PTX or uses undeclared names.

    ``UnsupportedError``, one of these, if it has anything that the records cannot say. Functions are put in
    the place of their calls.
    """
    return _Reader(text).module()


class _Reader:
    def __init__(self, text: str) -> None:
        self._source = Source(text)
        self._version: tuple[int, int] | None = None
        self._target = ""
        self._files: dict[int, str] = {}
        self._variables: list[Variable] = []
        self._bodies: list[Body] = []
        self._names: set[str] = set()
        self._functions: dict[str, Function] = {}

    def module(self) -> Module:
        source = self._source
        position, end = 0, len(source.text.rstrip())
        for found in _FUNCTION.finditer(source.text):
            function = self._function(found.end(), source.line(found.start()))
            if function.body is not None or function.name not in self._functions:
                self._functions[function.name] = function
        while position < end:
            match = _NEXT.match(source.text, position)
            if match is None:
                raise PtxError("a statement does not end", source.next_line(position))
            position = self._take(match)
        if self._version is None or not self._target:
            raise PtxError("a module needs .version and .target", source.last_line)
        return Module(
            target=self._target,
            version=self._version,
            kernels=tuple(body.kernel(self._files) for body in self._bodies),
            globals=tuple(variable for variable in self._variables if variable.space != "shared"),
        )

    def _take(self, match: re.Match[str]) -> int:
        """Take in what ``match`` found; the position behind it."""
        kind = match.lastgroup or ""
        line = self._source.line(match.start(kind))
        if kind == "entry":
            return self._entry(match, line)
        if kind == "section":
            return self._section(match, line)
        if kind == "header":
            self._header(match[kind], line)
        elif kind == "file":
            self._file(match[kind], line)
        elif kind == "function":
            if match[kind] == "alias":
                raise UnsupportedError("an .alias of a function", line)
            return self._behind(match.end(), line)
        else:
            self._statement(match[kind].rstrip(), line)
        return match.end()

    def _entry(self, match: re.Match[str], line: int) -> int:
        name = match["entry"]
        head = _HEAD.match(self._source.text, match.end())
        if head is None:
            raise PtxError(f"the entry {name[:80]} has no body", line)
        params = declarations.params(head["params"] or "", line)
        launch = declarations.launch(head["launch"], self._source.next_line(head.start("launch")))
        if head["end"] == ";":
            return head.end()
        self._declare(name, line)
        body = Body(Entry(name, params, launch, line), tuple(self._variables), self._functions)
        self._bodies.append(body)
        return body.cut(self._source, head.end())

    def _function(self, position: int, line: int) -> Function:
        """The function whose declaration goes on at ``position``."""
        head = HEAD.match(self._source.text, position)
        if head is None:
            raise PtxError("a function without a name or an end", line)
        results, params = (parameters(head[part], line) for part in ("results", "params"))
        return Function(head["name"], results, params, head.end() if head["end"] == "{" else None, line)

    def _behind(self, position: int, line: int) -> int:
        """The position behind a function whose declaration goes on at ``position``."""
        head = HEAD.match(self._source.text, position)
        assert head is not None
        position, depth = head.end(), int(head["end"] == "{")
        while depth:
            brace = _BRACES.search(self._source.text, position)
            if brace is None:
                raise PtxError(f"the body of {head['name'][:80]} does not end", line)
            depth += 1 if brace.group() == "{" else -1
            position = brace.end()
        return position

    def _section(self, match: re.Match[str], line: int) -> int:
        depth = match["section"].count("{")
        position = match.end()
        while depth or not match["section"].endswith("{"):
            brace = _BRACES.search(self._source.text, position)
            if brace is None:
                raise PtxError("a section does not end", line)
            depth += 1 if brace.group() == "{" else -1
            position = brace.end()
            if depth <= 0:
                break
        return position

    def _header(self, text: str, line: int) -> None:
        if match := _VERSION.fullmatch(text):
            self._version = (int(match[1]), int(match[2]))
        elif match := _TARGET.fullmatch(text):
            self._target = match[1]
        elif text.split() == ["address_size", "32"]:
            raise UnsupportedError("addresses of 32 bits", line)
        elif text.split() != ["address_size", "64"]:
            raise PtxError(f".{text[:80]} is no header", line)

    def _file(self, text: str, line: int) -> None:
        match = _FILE.fullmatch(text)
        if match is None:
            raise PtxError(f".file{text[:80]} names no file", line)
        self._files[int(match[1])] = match[2]

    def _statement(self, text: str, line: int) -> None:
        if not text or text.startswith(".pragma"):
            return
        for variable in declarations.variables(text, line):
            if variable.space not in ("shared", "global", "const"):
                raise UnsupportedError(f"a .{variable.space} variable outside an entry", line)
            if variable.extern and variable.space != "shared":
                raise UnsupportedError(f"the variable {variable.name} of another module", line)
            self._declare(variable.name, line)
            self._variables.append(variable)

    def _declare(self, name: str, line: int) -> None:
        if name in self._names:
            raise PtxError(f"{name[:80]} is declared twice", line)
        self._names.add(name)
