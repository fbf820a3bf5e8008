"""The 128-byte descriptor of a tiled tensor (PTX 5.5.8) as CuTe-DSL's host code writes it: 64 bytes count.

    tensor_map = decode(descriptor_bytes)     # or a DescriptorError that names what is not understood
    descriptor_bytes = encode(tensor_map)     # for tests

Little-endian words of 32 bits: 0-1 address; 2 rank-1 (bits 4-6), element type (7-10), swizzle (13-14); 3-6
the low and 7 the high four bits of each stride >> 4 of dimensions 1-4; 8-12 extent-1; 13 box[0]-1 (bits
24-31); 14 box[1..4]-1, a byte each. Bits 1, 18 and 21 of word 2 (constants, and a hint to the L2 cache)
change no result. The low bits of word 13 are the element strides; their encoding is not known, so anything
but zero is refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from attn4.emulator.faults import EmulationError
from attn4.emulator.units.swizzle import Swizzle

# Codes of `tensormap.replace.elemtype` (PTX 9.7.9.28): name and bytes. The rest (8 f32.ftz, 11 and 12 tf32,
# 13-15 packed 4- and 6-bit elements) change or repack what they copy, and are refused.
ELEMENTS = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
}
SWIZZLES = (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128)
WORD2_KNOWN = 0x7 << 4 | 0xF << 7 | 0x3 << 13 | 1 << 1 | 1 << 18 | 3 << 21
WORD2_CONSTANT = 1 << 1 | 1 << 18
BOX_LIMIT = 256


class DescriptorError(EmulationError):
    """A descriptor with a field that hardware forbids or that is not understood; the message names it."""


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tiled tensor in global memory; dimension 0 is contiguous.

    Attributes
    ----------
    address
        Of the first element, a multiple of 16.
    element
        "u8" "u16" "u32" "s32" "u64" "s64" "f16" "bf16" "f32" or "f64".
    shape
        Elements along each of the 1-5 dimensions.
    strides
        Bytes between neighbours along each dimension; the first is the size of an element.
    box
        Elements along each dimension of the tile that one copy moves, each 1-256.
    swizzle
        How a tile's 16-byte chunks are permuted in shared memory.
    """

    address: int
    element: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle = Swizzle.NONE

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a full box: what a load counts on its barrier, clipped or not."""
        return prod(self.box) * self.strides[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of the box along dimension 0."""
        return self.box[0] * self.strides[0]


def decode(descriptor: bytes) -> TensorMap:
    """Read a descriptor of 64 bytes or more. Raises DescriptorError."""
    if len(descriptor) < 64:
        raise DescriptorError(f"tensor map of {len(descriptor)} bytes, 64 are needed")
    return _decode(descriptor[:64])


@lru_cache(maxsize=256)
def _decode(descriptor: bytes) -> TensorMap:
    words = struct.unpack("<16I", descriptor)
    if unknown := words[2] & ~WORD2_KNOWN:
        reason = "of interleave, fill or im2col?"
        raise DescriptorError(f"tensor map: bits {unknown:#x} of word 2 are not understood ({reason})")
    if words[2] & WORD2_CONSTANT != WORD2_CONSTANT:
        raise DescriptorError(f"no tensor map: word 2 is {words[2]:#x}, without bits {WORD2_CONSTANT:#x}")
    if unknown := words[13] & 0xFFFFFF:
        raise DescriptorError(f"tensor map: element strides ({unknown:#x} in word 13) are not emulated")
    rank, kind = (words[2] >> 4 & 7) + 1, words[2] >> 7 & 15
    if rank > 5 or kind not in ELEMENTS:
        raise DescriptorError(
            f"tensor map of rank {rank} and element type {kind}; known are 1-5 and {tuple(ELEMENTS)}"
        )
    element, size = ELEMENTS[kind]
    high = words[7]
    strides = tuple((words[3 + i] | (high >> 4 * i & 15) << 32) << 4 for i in range(rank - 1))
    boxes = (words[13] >> 24, *(words[14] >> 8 * i & 255 for i in range(4)))
    result = TensorMap(
        address=words[0] | words[1] << 32,
        element=element,
        shape=tuple(words[8 + i] + 1 for i in range(rank)),
        strides=(size, *strides),
        box=tuple(b + 1 for b in boxes[:rank]),
        swizzle=SWIZZLES[words[2] >> 13 & 3],
    )
    _check(result)
    return result


def encode(tensor_map: TensorMap) -> bytes:
    """Write the 128-byte descriptor of a map; the upper half is zero. Raises DescriptorError."""
    _check(tensor_map)
    code = next(code for code, (name, _) in ELEMENTS.items() if name == tensor_map.element)
    strides = [s >> 4 for s in tensor_map.strides[1:]] + [0] * (5 - tensor_map.rank)
    extents = [s - 1 for s in tensor_map.shape] + [0] * (5 - tensor_map.rank)
    boxes = [b - 1 for b in tensor_map.box] + [0] * (5 - tensor_map.rank)
    word2 = WORD2_CONSTANT | (tensor_map.rank - 1) << 4 | code << 7 | SWIZZLES.index(tensor_map.swizzle) << 13
    words = (
        tensor_map.address & 0xFFFFFFFF,
        tensor_map.address >> 32,
        word2,
        *(s & 0xFFFFFFFF for s in strides),
        sum((s >> 32) << 4 * i for i, s in enumerate(strides)),
        *extents,
        boxes[0] << 24,
        sum(b << 8 * i for i, b in enumerate(boxes[1:])),
        0,
    )
    return struct.pack("<16I", *words) + bytes(64)


def _check(tensor_map: TensorMap) -> None:
    """What cuTensorMapEncodeTiled demands (CUDA driver API), and that a swizzled row fills the span."""
    if tensor_map.address % 16 or any(s % 16 for s in tensor_map.strides[1:]):
        what = f"address {tensor_map.address:#x} and strides {tensor_map.strides[1:]}"
        raise DescriptorError(f"tensor map: {what} must be multiples of 16")
    if (
        not 1 <= tensor_map.rank <= 5
        or len(tensor_map.box) != tensor_map.rank
        or len(tensor_map.strides) != tensor_map.rank
    ):
        what = f"shape {tensor_map.shape}, strides {tensor_map.strides}, box {tensor_map.box}"
        raise DescriptorError(f"tensor map: {what} must have the same 1-5 dimensions")
    if any(not 1 <= b <= BOX_LIMIT for b in tensor_map.box):
        raise DescriptorError(f"tensor map: box {tensor_map.box}, each 1-{BOX_LIMIT}")
    row, swizzle = tensor_map.row_bytes, tensor_map.swizzle
    if row % 16:
        raise DescriptorError(f"tensor map: rows of the box have {row} bytes, not a multiple of 16")
    if swizzle is not Swizzle.NONE and row != swizzle.value:
        what = f"rows of the box have {row} bytes under a swizzle of {swizzle.value}"
        raise DescriptorError(f"tensor map: {what}; only rows as long as the swizzle are emulated")
