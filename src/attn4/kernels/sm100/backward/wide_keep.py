"""K of the other CTA's columns into tensor memory, once a tile: there S takes it as operand A for nothing."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import tensor_memory

PIECE = 16
"""Columns of tensor memory that a thread holds at a time."""

WORDS = 4
"""That it reads at once: 16 bytes."""


@cute.jit
def keep(tile, keys, columns, thread, ends):
    """Copy each thread's row of ``keys``, (rows, elements) in shared memory, to its lane of ``columns``."""
    if tile.first < tile.last:
        ends.key_other.wait()
        elements = WORDS * Int32.width // keys.element_type.width
        row = cute.zipped_divide(keys, (1, elements))
        for first in cutlass.range_constexpr(0, cute.size(columns, mode=[1]), PIECE):
            words = cute.make_rmem_tensor(PIECE, Int32)
            for at in cutlass.range_constexpr(0, PIECE, WORDS):
                piece = cute.make_tensor(words.iterator + at, cute.make_layout(WORDS))
                source = row[(0, None), (thread, (first + at) // WORDS)]
                cute.autovec_copy(source, cute.recast_tensor(piece, keys.element_type))
            tensor_memory.store(cute.recast_tensor(words, Float32), columns, first, thread)
        tensor_memory.wait_stores()
        tensor_memory.before_arrive()
        ends.kept_keys.signal()
