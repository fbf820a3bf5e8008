"""The few facts of a 64-bit ELF file that launching needs: its sections, and where its bytes end."""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = b"\x7fELF\x02\x01"
_NOBITS = 8


class Section(NamedTuple):
    """A section header. ``size`` is in bytes, also of one that has none in the file."""

    name: str
    offset: int
    size: int
    in_file: bool


def sections(elf: bytes) -> dict[str, Section]:
    """The sections of ``elf`` by name. Raises ValueError if it is no 64-bit little-endian ELF file."""
    if elf[: len(MAGIC)] != MAGIC:
        raise ValueError("These bytes are no 64-bit little-endian ELF file.")
    try:
        (table,) = struct.unpack_from("<Q", elf, 0x28)
        entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
        names = headers[names_index][4]
        found = [
            Section(text_at(elf, names + name), offset, size, kind != _NOBITS)
            for name, kind, _, _, offset, size in headers
        ]
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(f"The ELF file is damaged: {error}.") from error
    return {section.name: section for section in found}


def extent(elf: bytes) -> int:
    """Bytes from the start of ``elf`` to the end of what its headers point to."""
    segments: int
    table: int
    segments, table = struct.unpack_from("<QQ", elf, 0x20)
    segment_size, segment_count, entry_size, count = struct.unpack_from("<HHHH", elf, 0x36)
    ends = [section.offset + section.size for section in sections(elf).values() if section.in_file]
    ends += [segments + segment_size * segment_count, table + entry_size * count]
    return max(ends)


def text_at(elf: bytes, offset: int) -> str:
    """The zero-terminated text at ``offset``."""
    return elf[offset : elf.index(b"\0", offset)].decode()
