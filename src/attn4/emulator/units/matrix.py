"""Shared-memory descriptors of products, and the matrices that they name (PTX 9.7.15.5.1, 9.7.16.4).

    operand = decode_wgmma(bits) | decode_tcgen05(bits)       # MatrixDescriptor, or DescriptorError
    words = gather(shared, operand, Tile(rows=128, depth=16, element_bytes=2, mn_major=False))
    chunks = chunk_offsets(shared, operand, tile)             # for hazards: the 16-byte chunks that it reads

``rows`` is M or N, ``depth`` is K; K-major means that neighbours along K are neighbours in memory. The
layouts are the canonical ones of PTX, swizzled by absolute address. With W the span of the swizzle / 16:

    K-major    row r, 16-byte chunk c     (r % 8) span + (r // 8) stride + 16 c
               without swizzle            (r % 8) 16   + (r // 8) stride + c leading
    MN-major   16-byte chunk m, column k  (m % W) 16 + (m // W) leading + (k % 8) span + (k // 8) stride
               without swizzle            m stride + (k % 8) 16 + (k // 8) leading
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attn4.emulator.state.memory import MemoryFault, SharedMemory
from attn4.emulator.units.swizzle import PERIOD, Swizzle, swizzled
from attn4.emulator.units.tensormap import DescriptorError

Index = npt.NDArray[np.int64]
Words = npt.NDArray[Any]

_WGMMA_LAYOUTS = {0: Swizzle.NONE, 1: Swizzle.B128, 2: Swizzle.B64, 3: Swizzle.B32}
_TCGEN05_LAYOUTS = {0: Swizzle.NONE, 2: Swizzle.B128, 4: Swizzle.B64, 6: Swizzle.B32}


@dataclass(frozen=True, slots=True)
class MatrixDescriptor:
    """Where a matrix lies: offset in the CTA's window, leading and stride offsets in bytes, swizzle."""

    address: int
    leading: int
    stride: int
    swizzle: Swizzle


@dataclass(frozen=True)
class Tile:
    """What a product reads of an operand: ``rows`` along M or N by ``depth`` along K."""

    rows: int
    depth: int
    element_bytes: int
    mn_major: bool = False

    @cached_property
    def number(self) -> int:
        """The tile as one number."""
        return self.rows << 32 | self.depth << 16 | self.element_bytes << 1 | self.mn_major


@lru_cache(maxsize=4096)
def decode_wgmma(bits: int) -> MatrixDescriptor:
    """Read a descriptor of wgmma (PTX 9.7.15.5.1.2.2). Raises DescriptorError."""
    _reject(bits, ~_COMMON & ~(3 << 62) & _ALL, "bits")
    return _decode(bits, _WGMMA_LAYOUTS[bits >> 62])


@lru_cache(maxsize=4096)
def decode_tcgen05(bits: int) -> MatrixDescriptor:
    """Read a descriptor of tcgen05 (PTX 9.7.16.4.1). Raises DescriptorError."""
    if bits >> 46 & 7 != 1:
        raise DescriptorError(
            f"matrix descriptor {bits:#x}: bits 46-48 are {bits >> 46 & 7}, tcgen05 demands 1"
        )
    _reject(bits, 1 << 52, "absolute leading address, bit")
    _reject(bits, ~_COMMON & ~(7 << 61) & ~(7 << 46) & _ALL, "bits")
    layout = bits >> 61
    if layout not in _TCGEN05_LAYOUTS:
        raise DescriptorError(f"matrix descriptor {bits:#x}: of the swizzling modes 0, 2, 4, 6, not {layout}")
    return _decode(bits, _TCGEN05_LAYOUTS[layout])


def encode_wgmma(descriptor: MatrixDescriptor) -> int:
    """The bits of a descriptor of wgmma, for tests."""
    code = next(code for code, swizzle in _WGMMA_LAYOUTS.items() if swizzle is descriptor.swizzle)
    return _encode(descriptor) | code << 62


def encode_tcgen05(descriptor: MatrixDescriptor) -> int:
    """The bits of a descriptor of tcgen05, for tests."""
    code = next(code for code, swizzle in _TCGEN05_LAYOUTS.items() if swizzle is descriptor.swizzle)
    return _encode(descriptor) | code << 61 | 1 << 46


def gather(shared: SharedMemory, descriptor: MatrixDescriptor, tile: Tile) -> Words:
    """The matrix as unsigned words, (rows, depth), maybe a transposed view. Raises MemoryFault."""
    phase = descriptor.address % PERIOD
    index = _chunks(descriptor.leading, descriptor.stride, descriptor.swizzle, tile, phase)
    base = shared.absolute(descriptor.address) - phase - shared.base >> 4
    chunks = index + base
    # take() counts negative indices from the end: a matrix that begins below the base is looked at first.
    if base < 0 and int(chunks.min()) < 0:
        raise _out_of_bounds(shared, chunks)
    try:
        words = shared.chunks.take(chunks).view(f"u{tile.element_bytes}")
    except IndexError:
        raise _out_of_bounds(shared, chunks) from None
    shared.check_chunks(chunks)
    return words.T if tile.mn_major else words


def chunk_offsets(shared: SharedMemory, descriptor: MatrixDescriptor, tile: Tile) -> Index:
    """Index in ``shared.chunks`` of each 16-byte chunk that ``gather`` reads."""
    phase = descriptor.address % PERIOD
    index = _chunks(descriptor.leading, descriptor.stride, descriptor.swizzle, tile, phase)
    return index + (shared.absolute(descriptor.address) - phase - shared.base >> 4)


@lru_cache(maxsize=1024)
def _chunks(leading: int, stride: int, swizzle: Swizzle, tile: Tile, phase: int) -> Index:
    """Chunks, numbered from the 1024-byte line that holds the start: (rows, ..) or, MN-major, (depth, ..)."""
    span = swizzle.value
    across = (tile.rows if tile.mn_major else tile.depth) * tile.element_bytes
    if across % 16:
        raise DescriptorError(f"a matrix of {across} bytes along its major dimension, not a multiple of 16")
    chunk = np.arange(across // 16, dtype=np.int64)
    if tile.mn_major:
        k = np.arange(tile.depth, dtype=np.int64)[:, None]
        if swizzle is Swizzle.NONE:
            offset = chunk * stride + (k % 8) * 16 + (k // 8) * leading
        else:
            width = span // 16
            across_rows = (chunk % width) * 16 + (chunk // width) * leading
            offset = across_rows + (k % 8) * span + (k // 8) * stride
    else:
        row = np.arange(tile.rows, dtype=np.int64)[:, None]
        along = chunk * (leading if swizzle is Swizzle.NONE else 16)
        offset = (row % 8) * span + (row // 8) * stride + along
    index = swizzled(phase + offset, swizzle) >> 4
    index.flags.writeable = False
    return index


_COMMON = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49
_ALL = (1 << 64) - 1


def _decode(bits: int, swizzle: Swizzle) -> MatrixDescriptor:
    _reject(bits, 7 << 49, "base offset (a swizzle pattern that starts off its boundary), bits")
    address, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return MatrixDescriptor(address, leading, stride, swizzle)


def _encode(descriptor: MatrixDescriptor) -> int:
    return descriptor.address >> 4 | descriptor.leading >> 4 << 16 | descriptor.stride >> 4 << 32


def _reject(bits: int, unknown: int, what: str) -> None:
    if bits & unknown:
        raise DescriptorError(f"matrix descriptor {bits:#x}: {what} {bits & unknown:#x} not understood")


def _out_of_bounds(shared: SharedMemory, chunks: Index) -> MemoryFault:
    low, high = (shared.base + int(chunk) * 16 for chunk in (chunks.min(), chunks.max()))
    where = f"{low:#x}..{high + 16:#x}, outside {shared.base:#x}..{shared.end:#x}"
    message = f"{shared.name}: a matrix descriptor reaches {where}"
    return MemoryFault("out of bounds", message, address=low, nbytes=high + 16 - low)
