"""A step of the tensor core on 16-bit floats in one call, where vector functions can be compiled.

    operand = in_shared(shared, bits, tile, decode_wgmma) | in_words(words)      # Operand, of 16-byte chunks
    add_step("bf16", a, b, d, stride, accumulate=True)                   # d: the address of float32 elements

The same bits as ``dot`` and a float32 sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attn4.emulator.state.memory import SharedMemory
from attn4.emulator.units.matrix import MatrixDescriptor, Tile, chunk_offsets
from attn4.emulator.vector.products import COLUMNS, DEPTH, functions

Words = npt.NDArray[Any]
Places = npt.NDArray[np.int64]
CHUNK = 16


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand as `vector.products` names it: an address, the places of chunks, and what keeps both."""

    address: int
    places: int
    rows: int
    mn_major: bool
    keeps: Any


def fits(kind: str, depth: int, columns: int) -> bool:
    """Whether a step of this format and size can be made in one call."""
    return (kind, False) in functions() and depth == DEPTH and columns <= COLUMNS and columns % 8 == 0


def in_shared(
    shared: SharedMemory, bits: int, tile: Tile, decode: Callable[[int], MatrixDescriptor]
) -> Operand | None:
    """A matrix in shared memory; None where it is not all inside and written, as `matrix.gather` reports."""
    known: dict[tuple[int, int], Operand] = shared.matrices
    key = (bits, tile.number)
    found = known.get(key)
    if found is None:
        places = np.ascontiguousarray(chunk_offsets(shared, decode(bits), tile))
        if places.min() < 0 or places.max() >= len(shared.chunks) or not shared.chunks_written(places):
            return None
        address = int(shared.bytes.ctypes.data)
        # What was written once stays so: the chunks need no second look.
        found = Operand(address, int(places.ctypes.data), tile.rows, tile.mn_major, places)
        known[key] = found
    return found


def in_words(words: Words) -> Operand:
    """Rows of 16 words, next to each other in each row."""
    rows, stride = words.shape[0], words.strides[0]
    places = _rows(rows, stride // CHUNK)
    return Operand(int(words.ctypes.data), int(places.ctypes.data), rows, False, (words, places))


@lru_cache(maxsize=256)
def _rows(rows: int, stride: int) -> Places:
    places = np.arange(rows, dtype=np.int64)[:, None] * stride + np.arange(2)
    places.flags.writeable = False
    return places


def add_step(kind: str, a: Operand, b: Operand, d: int, stride: int, *, accumulate: bool) -> None:
    """D = A B^T, or that added to D, whose rows lie ``stride`` elements apart from address ``d`` on."""
    step = functions()[kind, b.mn_major]
    step(a.address, a.places, a.rows, b.address, b.places, b.rows, d, stride, int(accumulate))
