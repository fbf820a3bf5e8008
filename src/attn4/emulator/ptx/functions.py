"""Device functions (PTX 5.4, 7.1): what a module declares, and how a call is taken apart.

A call of a function of the module is replaced by the function's body, in which each parameter stands for what
was passed. Functions that a driver provides, such as ``vprintf``, stay calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from attn4.emulator.ptx.errors import PtxError, UnsupportedError
from attn4.emulator.ptx.scan import IDENTIFIER, split

SYSTEM: frozenset[str] = frozenset(("vprintf", "__assertfail"))
"""Functions of the driver that the emulator has."""

HEAD = re.compile(
    rf"""\s*(?:\((?P<results>[^(){{}};]*)\)\s*)?(?P<name>{IDENTIFIER})\s*(?:\((?P<params>[^(){{}};]*)\))?
    (?P<rest>[^(){{}};]*)(?P<end>[{{;])""",
    re.VERBOSE | re.ASCII,
)
_CALL = re.compile(
    rf"""(?:@\s*(?P<guard>!?\s*{IDENTIFIER})\s+)?call(?P<uni>\.uni)?\s*
    (?:\((?P<results>[^()]*)\)\s*,\s*)?(?P<name>{IDENTIFIER})\s*
    (?:,\s*\((?P<arguments>[^()]*)\)\s*)?(?P<more>,.*)?""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_PARAMETER = re.compile(
    rf"""\.(?P<space>param|reg)\s+(?:\.align\s+\d+\s+)?\.(?P<type>\w+)\s+(?:\.ptr\s+[^%A-Za-z_]*)?
    (?P<name>{IDENTIFIER})\s*(?:\[\s*\d*\s*\])?""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or result of a function: its name, whether it is a register, and its type."""

    name: str
    register: bool
    type: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the module; ``body`` is the position behind its opening brace, None if it has none."""

    name: str
    results: tuple[Parameter, ...]
    params: tuple[Parameter, ...]
    body: int | None
    line: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it is written: the guard with its negation, and the names or constants between brackets."""

    guard: str
    name: str
    results: tuple[str, ...]
    arguments: tuple[str, ...]


def parameters(text: str | None, line: int) -> tuple[Parameter, ...]:
    """The parameters between the brackets of a declaration."""
    found = []
    for number, item in enumerate(split(text or "", line)):
        match = _PARAMETER.fullmatch(item.strip())
        if match is None and re.fullmatch(r"\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s*_?", item.strip()):
            found.append(Parameter(f"_{number}", register=False, type=""))
        elif match is None:
            raise UnsupportedError(f"the parameter {item.strip()[:80]} of a function", line)
        else:
            found.append(Parameter(match["name"], match["space"] == "reg", match["type"]))
    return tuple(found)


def call(text: str, line: int) -> Call:
    """The parts of a ``call`` statement."""
    match = _CALL.fullmatch(text)
    if match is None:
        raise PtxError(f"no call: {' '.join(text.split())[:80]}", line)
    if match["more"]:
        raise UnsupportedError("a call through a pointer to a function", line)
    guard = "".join((match["guard"] or "").split())
    lists = [tuple(split(match[name] or "", line)) for name in ("results", "arguments")]
    return Call(guard, match["name"], *lists)
