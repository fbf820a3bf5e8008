"""Swizzles of shared memory: bits 4-6 of an *absolute* address XORed with bits 7-9, as many as the span has.

PTX 5.5.7: 128-byte swizzle permutes the 16-byte chunks of 128 bytes by the number of the 128-byte line, the
64- and 32-byte swizzles those of 64 and 32 bytes by the line's number modulo 4 and 2.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

PERIOD = 1024  # bytes after which every swizzle repeats

Index = npt.NDArray[np.int64]


class Swizzle(Enum):
    """The value is the span in bytes whose 16-byte chunks are permuted; 16 for none."""

    NONE = 16
    B32 = 32
    B64 = 64
    B128 = 128


def swizzled(addresses: npt.NDArray[Any], swizzle: Swizzle) -> npt.NDArray[Any]:
    """Where the bytes that a plain layout puts at absolute ``addresses`` lie (int64 arrays)."""
    chunks = swizzle.value // 16 - 1
    result: npt.NDArray[Any] = addresses ^ (((addresses >> 7) & chunks) << 4)
    return result


@lru_cache(maxsize=1024)
def tile_chunks(count: int, phase: int, swizzle: Swizzle) -> Index:
    """Chunks, numbered from a 1024-byte line on, of a tile of ``count`` that begins at chunk ``phase``."""
    index = swizzled((phase + np.arange(count, dtype=np.int64)) << 4, swizzle) >> 4
    index.flags.writeable = False
    return index
