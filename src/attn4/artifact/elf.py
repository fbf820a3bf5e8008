"""What the assembler spent on a kernel, read from the cubin inside a shared object.

The attribute numbers are those of the ``.nv.info`` sections that ``readelf`` and ``cuobjdump`` show:
0x2f register count, 0x11 frame size, both as pairs (symbol index, value).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_ELF_MAGIC = b"\x7fELF\x02"
_EM_CUDA = 190
_FORMAT_SIZED = 4
_ATTRIBUTE_FRAME_SIZE = 0x11
_ATTRIBUTE_REGISTERS = 0x2F


@dataclass(frozen=True, slots=True)
class KernelResources:
    """``registers`` a thread at launch, ``stack_bytes`` a thread (0: nothing spilled), size of the code."""

    name: str
    registers: int
    stack_bytes: int
    code_bytes: int


class _Section(NamedTuple):
    name: str
    offset: int
    size: int


def cubins(library: bytes) -> Iterator[bytes]:
    """The cubins that ``library`` (a shared object) embeds uncompressed, each with what follows it."""
    start = library.find(_ELF_MAGIC, 1)
    while start >= 0:
        (machine,) = struct.unpack_from("<H", library, start + 18)
        if machine == _EM_CUDA:
            yield library[start:]
        start = library.find(_ELF_MAGIC, start + 1)


def kernel_resources(library: bytes) -> tuple[KernelResources, ...]:
    """Resources of every kernel in the cubins of ``library``."""
    return tuple(found for cubin in cubins(library) for found in _cubin_resources(cubin))


def _cubin_resources(cubin: bytes) -> list[KernelResources]:
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    values: dict[int, dict[str, int]] = {_ATTRIBUTE_REGISTERS: {}, _ATTRIBUTE_FRAME_SIZE: {}}
    for attribute, payload in _attributes(cubin, sections[".nv.info"]):
        if attribute in values:
            symbol, value = struct.unpack_from("<II", payload)
            values[attribute][symbols[symbol]] = value
    return [
        KernelResources(
            name=name,
            registers=registers,
            stack_bytes=values[_ATTRIBUTE_FRAME_SIZE].get(name, 0),
            code_bytes=sections[f".text.{name}"].size,
        )
        for name, registers in values[_ATTRIBUTE_REGISTERS].items()
    ]


def _sections(elf: bytes) -> dict[str, _Section]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    sections = {}
    for name, _, _, _, offset, size in headers:
        text = _text(elf, names + name)
        sections[text] = _Section(text, offset, size)
    return sections


def _symbols(elf: bytes, sections: dict[str, _Section]) -> list[str]:
    _, offset, size = sections[".symtab"]
    strings = sections[".strtab"].offset
    entries = struct.iter_unpack("<IBBHQQ", elf[offset : offset + size])
    return [_text(elf, strings + name) for name, *_ in entries]


def _attributes(elf: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    at, end = section.offset, section.offset + section.size
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", elf, at)
        at += 4
        if form == _FORMAT_SIZED:
            yield attribute, elf[at : at + value]
            at += value


def _text(elf: bytes, offset: int) -> str:
    return elf[offset : elf.index(b"\0", offset)].decode()
