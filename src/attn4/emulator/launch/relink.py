"""A copy of a shared object that asks the emulator for what it would ask the CUDA runtime for.

The names of its undefined symbols are changed in place, to names of the same length that only the shim
defines. Whatever else the process has loaded, before or after, the copy binds to the shim
and nothing but the copy does: neither the order of loading nor the linker's scopes decide it. The file
itself, and a copy of it that is loaded for a GPU, stay as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import NamedTuple

from attn4.emulator.launch.elf import sections, text_at
from attn4.emulator.launch.errors import LaunchError

_SYMBOL = struct.Struct("<IBBHQQ")
RUNTIME_PREFIXES = ("_cu", "cuda_dialect_", "CuteDSLRT_")
"""How the names of the functions begin that CuTe-DSL's runtime offers."""

_PRIVATE = "a4_"


class _Symbol(NamedTuple):
    name: str
    name_at: int
    defined: bool


def private_name(symbol: str) -> str:
    """What ``symbol`` of the CUDA runtime is called in the shim; as long as it was."""
    return _PRIVATE + symbol[len(_PRIVATE) :]


def relinked(library: bytes, offered: Collection[str]) -> bytes:
    """``library`` with each of its calls to the CUDA runtime under the private name.

    Raises LaunchError that names the symbols which are not in ``offered``, ValueError for no shared object.
    """
    symbols = _symbols(library)
    wanted = [symbol for symbol in symbols if not symbol.defined and symbol.name.startswith(RUNTIME_PREFIXES)]
    missing = sorted(symbol.name for symbol in wanted if symbol.name not in offered)
    if missing:
        raise LaunchError(f"The kernel's host code calls what is not emulated: {', '.join(missing)}.")
    copy = bytearray(library)
    for symbol in wanted:
        changed = range(symbol.name_at, symbol.name_at + len(_PRIVATE))
        # A linker may let one name be the end of another: then a change of one is a change of both.
        shared = [other.name for other in symbols if other is not symbol and other.name_at in changed]
        if shared or library[symbol.name_at - 1] != 0:
            raise LaunchError(f"The name of {symbol.name} is part of another in the kernel's shared object.")
        copy[changed.start : changed.stop] = _PRIVATE.encode()
    return bytes(copy)


def _symbols(library: bytes) -> list[_Symbol]:
    found = sections(library)
    if ".dynsym" not in found or ".dynstr" not in found:
        raise ValueError("This ELF file is no shared object: it has no dynamic symbols.")
    table, strings = found[".dynsym"], found[".dynstr"].offset
    entries = _SYMBOL.iter_unpack(library[table.offset : table.offset + table.size])
    return [
        _Symbol(text_at(library, strings + name), strings + name, section != 0)
        for name, _, _, section, _, _ in entries
        if name
    ]
