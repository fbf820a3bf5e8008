"""A compiled module as host code loads it: which cubin it is, and what each of its kernels takes.

A fat binary is magic 0xBA55ED50, u16 version, u16 header size, u64 size, then entries: u16 kind (1 PTX, 2
ELF), u16 version, u32 header size, u64 size, ... (read off binaries of CUDA 13). The sizes of a kernel's
parameters come from the PTX, and are held against the cubin's own list, attribute 0x17 of
``.nv.info.<kernel>``: u32 index, u16 ordinal, u16 offset, u32 whose bits 18 and up are the size.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
from dataclasses import dataclass

from attn4.emulator.launch.elf import MAGIC, extent, sections
from attn4.emulator.launch.errors import LaunchError

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_FATBIN_HEADER = struct.Struct("<IHHQ")
_FATBIN_ENTRY = struct.Struct("<HHIQ")
_WRAPPER_MAGIC = 0x466243B1
_WRAPPER_BINARY = 8
_KIND_ELF = 2
_EM_CUDA = 190

_FORMAT_SIZED = 4
_ATTRIBUTE_PARAMETER = 0x17
_SIZE_SHIFT = 18
_RESERVED_SHARED_BYTES = 0x400
"""The system's part of a block's shared memory, which ``.nv.shared.<kernel>`` counts in (from sm_90 on)."""

_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?")
_PARAMETER = re.compile(
    r"\.param\b.*?\.[a-z]+(\d+)\s+(?:\.ptr\b.*?\s)?[\w$%]+\s*(?:\[\s*(\d+)\s*\])?\s*$", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class KernelImage:
    """One kernel of a cubin: the bytes of each parameter, and of its static shared memory."""

    parameter_bytes: tuple[int, ...]
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Image:
    """A cubin and the PTX that it was assembled from. ``digest`` is the cubin's sha256, in hexadecimal.

    Two modules may hold kernels of one name: the digest is what tells them apart.
    """

    digest: str
    ptx: str
    kernels: dict[str, KernelImage]


def image(cubin: bytes, ptx: str) -> Image:
    """The image of ``cubin``. Raises LaunchError if ``ptx`` is not what it was assembled from."""
    stated = ptx_parameters(ptx)
    kernels = {}
    for name, kernel in _cubin_kernels(cubin).items():
        if name not in stated:
            raise LaunchError(f"The PTX has no kernel {name}, but the cubin that came with it has.")
        if stated[name] != kernel.parameter_bytes:
            raise LaunchError(
                f"The parameters of kernel {name} have {list(stated[name])} bytes in the PTX, and "
                f"{list(kernel.parameter_bytes)} in the cubin: the two do not belong together."
            )
        kernels[name] = kernel
    return Image(digest(cubin), ptx, kernels)


def digest(cubin: bytes) -> str:
    """sha256 of a cubin, without what pads it."""
    return hashlib.sha256(cubin[: extent(cubin)]).hexdigest()


def cubins_in(library: bytes) -> list[bytes]:
    """Every cubin in the fat binaries that ``library`` (a shared object) embeds."""
    found = []
    at = library.find(FATBIN_MAGIC)
    while at >= 0:
        _, _, header, size = _FATBIN_HEADER.unpack_from(library, at)
        found += _cubins(library[at : at + header + size])
        at = library.find(FATBIN_MAGIC, at + header + size)
    return found


def cubin_at(address: int) -> bytes:
    """The cubin that host code hands over at ``address``: bare, in a fat binary or in its wrapper.

    Raises LaunchError if there is none, or more than one.
    """
    (magic,) = struct.unpack("<I", ctypes.string_at(address, 4))
    if magic == _WRAPPER_MAGIC:
        (address,) = struct.unpack("<Q", ctypes.string_at(address + _WRAPPER_BINARY, 8))
    head = ctypes.string_at(address, _FATBIN_HEADER.size)
    if not head.startswith(FATBIN_MAGIC):
        raise LaunchError(f"A module of an unknown format was loaded (first bytes {head[:4].hex()}).")
    _, _, header, size = _FATBIN_HEADER.unpack(head)
    found = _cubins(ctypes.string_at(address, header + size))
    if len(found) != 1:
        raise LaunchError(f"A module with {len(found)} cubins was loaded; only one is understood.")
    return found[0]


def ptx_parameters(ptx: str) -> dict[str, tuple[int, ...]]:
    """The bytes of each parameter of each kernel in ``ptx``. Raises LaunchError that names the parameter."""
    found = {}
    for name, declared in _ENTRY.findall(ptx):
        parameters = [text.strip() for text in declared.split(",") if text.strip()]
        found[name] = tuple(_parameter_bytes(name, text) for text in parameters)
    return found


def _parameter_bytes(kernel: str, declaration: str) -> int:
    match = _PARAMETER.fullmatch(declaration)
    if match is None:
        raise LaunchError(f"Kernel {kernel} has a parameter that is not understood: {declaration}.")
    bits, elements = match.groups()
    return int(bits) // 8 * int(elements or 1)


def _cubins(fatbin: bytes) -> list[bytes]:
    _, _, at, size = _FATBIN_HEADER.unpack_from(fatbin)
    end, found = at + size, []
    while at < end:
        kind, _, header, size = _FATBIN_ENTRY.unpack_from(fatbin, at)
        payload = fatbin[at + header : at + header + size]
        at += header + size
        if kind != _KIND_ELF:
            continue
        if not payload.startswith(MAGIC):
            raise LaunchError("A module holds a compressed cubin, which cannot be told from another.")
        (machine,) = struct.unpack_from("<H", payload, 18)
        if machine == _EM_CUDA:
            found.append(payload[: extent(payload)])
    return found


def _cubin_kernels(cubin: bytes) -> dict[str, KernelImage]:
    found = sections(cubin)
    kernels = {}
    for name in (name.removeprefix(".text.") for name in found if name.startswith(".text.")):
        information = found.get(f".nv.info.{name}")
        content = cubin[information.offset : information.offset + information.size] if information else b""
        shared = found.get(f".nv.shared.{name}")
        static = max(0, shared.size - _RESERVED_SHARED_BYTES) if shared else 0
        kernels[name] = KernelImage(_parameter_list(content), static)
    return kernels


def _parameter_list(information: bytes) -> tuple[int, ...]:
    sizes: dict[int, int] = {}
    at = 0
    while at < len(information):
        form, attribute, value = struct.unpack_from("<BBH", information, at)
        at += 4
        if form != _FORMAT_SIZED:
            continue
        if attribute == _ATTRIBUTE_PARAMETER:
            _, ordinal, _, packed = struct.unpack_from("<IHHI", information, at)
            sizes[ordinal] = packed >> _SIZE_SHIFT
        at += value
    return tuple(sizes[ordinal] for ordinal in sorted(sizes))
