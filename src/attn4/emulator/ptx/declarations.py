"""Variables, parameters and what an entry demands of its launch."""

from __future__ import annotations

import re
from dataclasses import replace

from attn4.emulator.ptx.errors import PtxError, UnsupportedError
from attn4.emulator.ptx.module import Launch, Param, Variable
from attn4.emulator.ptx.numbers import immediate, signed
from attn4.emulator.ptx.scan import IDENTIFIER, split

_WIDTHS = {
    **dict.fromkeys(("b8", "u8", "s8"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 64),
    "b128": 128,
}
_FLOATS = ("f32", "f64")
_VECTORS = {None: 1, "v2": 2, "v4": 4}
_LARGEST = 2**40  # bytes of one variable
_DIRECTIVE = re.compile(r"\s*\.\s*(\w+)\s*([^.\s][^.]*)?", re.ASCII)
_PRAGMA = re.compile(r'\.pragma\s*"[^"\n]*"\s*;')
_VARIABLE = re.compile(
    r"""(?P<linkage>(?:\.(?:extern|visible|weak|common)\s+)*)\.(?P<space>\w+)\s*
    (?P<before>(?:\.(?:align\s+\w+|ptr|const|global|local|shared|attribute\s*\([^)]*\))\s*)*)
    (?:\.(?P<vector>v[24])\s*)?\.(?P<type>\w+)\s*
    (?P<after>(?:\.(?:align\s+\w+|ptr|const|global|local|shared)\s*)*)
    (?P<names>[^.\s].*)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_ALIGN = re.compile(r"\.align\s+(\w+)", re.ASCII)
_NAME = re.compile(
    rf"(?P<name>{IDENTIFIER})\s*(?P<bounds>(?:\[\s*\w*\s*\]\s*)*)(?P<initial>=.*)?", re.DOTALL | re.ASCII
)
_BOUND = re.compile(r"\[\s*(\w*)\s*\]", re.ASCII)


def number(text: str, line: int) -> int:
    """A count, size or alignment: an integer constant that is not negative."""
    constant = immediate(text.strip(), line)
    if constant.type not in ("s64", "u64") or signed(constant) < 0:
        raise PtxError(f"{text.strip()[:80]} stands where a count belongs", line)
    return constant.value


def variables(text: str, line: int) -> list[Variable]:
    """The variables that a statement, without its semicolon, declares."""
    match = _VARIABLE.fullmatch(text)
    if match is None:
        raise PtxError(f"no declaration: {' '.join(text.split())[:80]}", line)
    space = match["space"]
    if space in ("tex", "surf", "sampler", "func", "alias") or ".attribute" in match["before"]:
        raise UnsupportedError(f"a declaration of .{space}, or with attributes", line)
    if space not in ("shared", "global", "const", "local", "param"):
        raise PtxError(f".{space} declares no variable", line)
    if match["type"] in ("texref", "samplerref", "surfref"):
        raise UnsupportedError(f"variables of type .{match['type']}", line)
    if match["type"] not in _WIDTHS:
        raise PtxError(f".{match['type']} is no type", line)
    element = _WIDTHS[match["type"]] // 8 * _VECTORS[match["vector"]]
    align = _align(match["before"] + match["after"], line) or element
    return [_variable(name, match, (element, align), line) for name in split(match["names"], line)]


def renamed(variable: Variable, name: str) -> Variable:
    """``variable`` under another name."""
    return replace(variable, name=name)


def _align(text: str, line: int) -> int:
    # A pointer parameter has a second .align, that of what it points to; the first is the parameter's own.
    own = text.partition(".ptr")[0]
    found = _ALIGN.search(own)
    align = number(found[1], line) if found else 0
    if found and (not 0 < align <= 2**20 or align & align - 1):
        raise PtxError(f"an alignment of {found[1]} is no power of two", line)
    return align


def _variable(text: str, statement: re.Match[str], layout: tuple[int, int], line: int) -> Variable:
    match = _NAME.fullmatch(text)
    if match is None:
        raise PtxError(f"{text[:80]} is no variable", line)
    element, align = layout
    bounds = [bound and number(bound, line) for bound in _BOUND.findall(match["bounds"])]
    size = element
    for bound in bounds:
        size = min(size * (bound or 0), _LARGEST + 1)
    initial = _initial(match["initial"], statement["type"], line) if match["initial"] else None
    if bounds[:1] == [""] and initial is not None and len(bounds) == 1:
        size = len(initial)
    extern = "extern" in statement["linkage"]
    if size > _LARGEST or (initial is not None and len(initial) > size):
        raise PtxError(f"{match['name']} does not fit: {size} bytes", line)
    if size == 0 and not extern:
        raise PtxError(f"{match['name']} has no size", line)
    return Variable(match["name"], statement["space"], statement["type"], align, size, initial, extern)


def _initial(text: str, kind: str, line: int) -> bytes:
    elements = text[1:].replace("{", " ").replace("}", " ")
    width = _WIDTHS[kind]
    data = bytearray()
    for element in split(elements, line):
        if element[0] not in "0123456789+-.":
            raise UnsupportedError(f"the address {element[:80]} in an initial value", line)
        try:
            value = immediate(element, line).bits(width, floating=kind in _FLOATS)
        except ValueError as error:
            raise error if isinstance(error, PtxError) else PtxError(str(error), line) from None
        data += value.to_bytes(width // 8, "little")
    return bytes(data)


def params(text: str, line: int) -> tuple[Param, ...]:
    """The parameters of an entry, laid out one after another at their alignments."""
    found: list[Param] = []
    end = 0
    for item in split(text, line):
        (variable,) = variables(item, line)
        if variable.space != "param" or variable.initial is not None:
            raise PtxError(f"{variable.name} is no parameter", line)
        offset = -(-end // variable.align) * variable.align
        found.append(Param(variable.name, variable.type, variable.align, variable.size, offset))
        end = offset + variable.size
    return tuple(found)


def launch(text: str, line: int) -> Launch:
    """What the directives between the parameters of an entry and its body say."""
    text = _PRAGMA.sub(" ", text)
    shapes: dict[str, tuple[int, int, int] | None] = {}
    counts: dict[str, int | None] = {}
    explicit = False
    position = 0
    for match in _DIRECTIVE.finditer(text):
        if match.start() != position:
            break
        position = match.end()
        name, values = match[1], [number(value, line) for value in split(match[2] or "", line)]
        if name in ("reqntid", "maxntid", "reqnctapercluster") and 1 <= len(values) <= 3:
            x, y, z = (*values, 1, 1)[:3]
            shapes[name] = (x, y, z)
        elif name in ("minnctapersm", "maxnreg", "maxclusterrank") and len(values) == 1:
            counts[name] = values[0]
        elif name == "explicitcluster" and not values:
            explicit = True
        elif name != "noreturn":
            raise UnsupportedError(f"the directive .{name} with {len(values)} values", line)
    if text[position:].strip():
        raise PtxError(f"{text[position:].strip()[:80]} stands before the body of an entry", line)
    return Launch(
        reqntid=shapes.get("reqntid"),
        maxntid=shapes.get("maxntid"),
        minnctapersm=counts.get("minnctapersm"),
        maxnreg=counts.get("maxnreg"),
        explicitcluster=explicit,
        reqnctapercluster=shapes.get("reqnctapercluster"),
        maxclusterrank=counts.get("maxclusterrank"),
    )
