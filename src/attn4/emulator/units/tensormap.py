"""The 128-byte descriptor of a tiled tensor (PTX 5.5.8), as the driver and CuTe-DSL's host code write it.

    tensor_map = decode(descriptor_bytes)     # or a DescriptorError that names what is not understood
    descriptor_bytes = encode(tensor_map)     # for tests

Of the little-endian words of 32 bits the first 16 count: 0-1 address; 3-6 the low and 7 the high four bits of
each stride >> 4 of dimensions 1-4; 8-12 extent-1; 13 box[0]-1 (bits 24-31) and the steps-1, three
bits each from bit 0; 14 box[1..4]-1, a byte each. Word 2: rank-1 (bits 4-6), element type (7-10), interleave
(11-12), swizzle (13-14), NaN for what lies outside (15), rounding to tf32 (16). Its bits 1, 17-18 (promotion
in the L2 cache) and 21 change no result. Learnt from `cuTensorMapEncodeTiled` (tests/recorded).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from attn4.emulator.faults import EmulationError
from attn4.emulator.units.swizzle import Swizzle

# Names and bytes of the element types. 12 and more (4- and 6-bit elements with gaps) repack what they copy.
ELEMENTS = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    8: ("f32.ftz", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
}
PAIRS_OF_4_BITS = 11  # two elements a byte, copied as they are: here bytes, of half as many
SWIZZLES = (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128)
WORD2_KNOWN = 0x7 << 4 | 0xF << 7 | 0xF << 13 | 1 << 1 | 3 << 17 | 3 << 21
WORD2_CONSTANT = 1 << 1 | 1 << 18  # as CuTe-DSL has them
NAN_FILL, TO_TF32 = 1 << 15, 1 << 16
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
        "u8" "u16" "u32" "s32" "u64" "s64" "f16" "bf16" "f32" "f32.ftz" or "f64".
    shape
        Elements along each of the 1-5 dimensions.
    strides
        Bytes between neighbours along each dimension; the first is the size of an element.
    box
        Elements along each dimension of the tile that one copy moves, each 1-256.
    swizzle
        How a tile's 16-byte chunks are permuted in shared memory.
    steps
        Distance along each dimension of the elements taken, 1-8; empty: 1. That of dimension 0 is 1.
    nan_fill
        Whether a load gives NaN, not zeros, for what lies outside the tensor.
    tf32
        Whether a load rounds float32 to tf32.
    per_byte
        Elements of 4 bits in one of ``element``, then "u8": 2. Coordinates of dimension 0 count them.
    """

    address: int
    element: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle = Swizzle.NONE
    steps: tuple[int, ...] = ()
    nan_fill: bool = False
    tf32: bool = False
    per_byte: int = 1

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a full box: what a load counts on its barrier, clipped or not."""
        return prod(self.counts) * self.strides[0]

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements along each dimension of a tile in shared memory."""
        if not self.steps:
            return self.box
        return (self.box[0], *(-(-b // s) for b, s in zip(self.box[1:], self.steps[1:], strict=True)))

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
        reason = "of interleave or im2col?"
        raise DescriptorError(f"tensor map: bits {unknown:#x} of word 2 are not understood ({reason})")
    if unknown := words[13] & 0xFF8000:
        raise DescriptorError(f"tensor map: bits {unknown:#x} of word 13 are not understood")
    rank, kind = (words[2] >> 4 & 7) + 1, words[2] >> 7 & 15
    per_byte = 2 if kind == PAIRS_OF_4_BITS else 1
    kind = 0 if kind == PAIRS_OF_4_BITS else kind
    if per_byte == 2 and (words[8] & 1, words[13] >> 24 & 1) != (1, 1):
        raise DescriptorError("tensor map: an odd number of elements of 4 bits in a row")
    if rank > 5 or kind not in ELEMENTS:
        raise DescriptorError(
            f"tensor map of rank {rank} and element type {kind}; known are 1-5 and {tuple(ELEMENTS)}"
        )
    element, size = ELEMENTS[kind]
    high = words[7]
    strides = tuple((words[3 + i] | (high >> 4 * i & 15) << 32) << 4 for i in range(rank - 1))
    boxes = ((words[13] >> 24) // per_byte, *(words[14] >> 8 * i & 255 for i in range(4)))
    result = TensorMap(
        address=words[0] | words[1] << 32,
        element=element,
        shape=((words[8] + 1) // per_byte, *(words[8 + i] + 1 for i in range(1, rank))),
        strides=(size, *strides),
        box=tuple(b + 1 for b in boxes[:rank]),
        swizzle=SWIZZLES[words[2] >> 13 & 3],
        steps=_steps(words[13], rank),
        nan_fill=bool(words[2] & NAN_FILL),
        tf32=bool(words[2] & TO_TF32),
        per_byte=per_byte,
    )
    _check(result)
    return result


def _steps(word: int, rank: int) -> tuple[int, ...]:
    """The steps of all dimensions, none if all are 1. The chip ignores that of dimension 0."""
    steps = (1, *((word >> 3 * n & 7) + 1 for n in range(1, rank)))
    return steps if any(step > 1 for step in steps) else ()


def encode(tensor_map: TensorMap) -> bytes:
    """Write the 128-byte descriptor of a map; the upper half is zero. Raises DescriptorError."""
    _check(tensor_map)
    code = next(code for code, (name, _) in ELEMENTS.items() if name == tensor_map.element)
    strides = [s >> 4 for s in tensor_map.strides[1:]] + [0] * (5 - tensor_map.rank)
    extents = [s - 1 for s in tensor_map.shape] + [0] * (5 - tensor_map.rank)
    boxes = [b - 1 for b in tensor_map.box] + [0] * (5 - tensor_map.rank)
    word2 = WORD2_CONSTANT | (tensor_map.rank - 1) << 4 | code << 7 | SWIZZLES.index(tensor_map.swizzle) << 13
    if tensor_map.per_byte == 2:
        word2 |= PAIRS_OF_4_BITS << 7
        extents[0], boxes[0] = 2 * extents[0] + 1, 2 * boxes[0] + 1
    word2 |= NAN_FILL * tensor_map.nan_fill | TO_TF32 * tensor_map.tf32
    words = (
        tensor_map.address & 0xFFFFFFFF,
        tensor_map.address >> 32,
        word2,
        *(s & 0xFFFFFFFF for s in strides),
        sum((s >> 32) << 4 * i for i, s in enumerate(strides)),
        *extents,
        boxes[0] << 24 | sum(step - 1 << 3 * n for n, step in enumerate(tensor_map.steps)),
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
    if tensor_map.steps and (
        len(tensor_map.steps) != tensor_map.rank or any(not 1 <= step <= 8 for step in tensor_map.steps)
    ):
        raise DescriptorError(f"tensor map: steps {tensor_map.steps}, each 1-8")
    floats = ("f16", "bf16", "f32", "f32.ftz", "f64")
    if (tensor_map.nan_fill and tensor_map.element not in floats) or (
        tensor_map.tf32 and not tensor_map.element.startswith("f32")
    ):
        raise DescriptorError(f"tensor map: NaN fill or tf32 with elements {tensor_map.element}")
    row, swizzle = tensor_map.row_bytes, tensor_map.swizzle
    if row % 16:
        raise DescriptorError(f"tensor map: rows of the box have {row} bytes, not a multiple of 16")
    if swizzle is not Swizzle.NONE and row != swizzle.value:
        what = f"rows of the box have {row} bytes under a swizzle of {swizzle.value}"
        raise DescriptorError(f"tensor map: {what}; only rows as long as the swizzle are emulated")
