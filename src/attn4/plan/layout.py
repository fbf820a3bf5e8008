"""Where buffers lie: sizes of dtypes, padded head dimensions, and packing into shared and tensor memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from attn4.plan.plan import Buffer, Channel, Space

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "int32": 4, "float32": 4, "int64": 8}

SWIZZLE_BYTES = 1024
"""A swizzle repeats every 8 rows of 128 bytes: a tile begins at a multiple (PTX ISA, tensor maps)."""

BULK_BYTES = 16
"""Alignment of everything else that a bulk copy or a vector access touches."""

TENSOR_COLUMN_BYTES = 128 * 4
"""One column of tensor memory: 128 lanes of 32 bits."""

BARRIER_BYTES = 8
"""One mbarrier object (PTX ISA)."""

HEAD_DIM_STEP = 32


def padded(head_dim: int) -> int:
    """The head dimension that a tile holds: rounded up to 32, 16-bit elements of half a swizzle row."""
    return -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP


def stage_size(space: Space, shape: tuple[int, ...], dtype: str) -> int:
    """Size of one stage: bytes in shared memory, columns in tensor memory."""
    size = prod(shape) * DTYPE_BYTES[dtype]
    return size if space == "shared" else -(-size // TENSOR_COLUMN_BYTES)


def alignment(buffer: Buffer) -> int:
    """The multiple at which a shared buffer must begin: 1024 for a tile of 16-bit elements, else 16."""
    tile = len(buffer.shape) > 1 and DTYPE_BYTES[buffer.dtype] == 2
    return SWIZZLE_BYTES if tile else BULK_BYTES


def barrier_count(channels: tuple[Channel, ...]) -> int:
    """Mbarriers of the channels: a full one for each slot, and an empty one if slots come back by it."""
    return sum(c.stages * (1 + (c.empty_arrivals > 0)) for c in channels if c.kind != "named")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A buffer without its place. ``at`` is an offset inside ``borrows``, the owner of the storage."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stages: int = 1
    borrows: str | None = None
    at: int = 0

    def size(self, space: Space) -> int:
        """Size over all stages: bytes in shared memory, columns in tensor memory."""
        return self.stages * stage_size(space, self.shape, self.dtype)


def pack(space: Space, pieces: tuple[Piece, ...]) -> tuple[Buffer, ...]:
    """``pieces`` one behind the other in the order given, borrowers inside their owners.

    Order tiles before small buffers and little is lost to alignment: a tile's size is a multiple of its
    alignment, and a small buffer begins at the next multiple of ``BULK_BYTES``. ``plan/channels.py`` checks
    the result.
    """
    placed: dict[str, Buffer] = {}
    end = 0
    for piece in pieces:
        offset = end if piece.borrows is None else placed[piece.borrows].offset + piece.at
        size = piece.size(space)
        placed[piece.name] = Buffer(
            piece.name, space, piece.shape, piece.dtype, piece.stages, offset, size, piece.borrows
        )
        if piece.borrows is None:
            end = offset + size
            if space == "shared":
                end = -(-end // BULK_BYTES) * BULK_BYTES
    return tuple(placed.values())
