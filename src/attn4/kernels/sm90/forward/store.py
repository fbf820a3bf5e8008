"""Output and LSE to global memory, while the next tile is loaded.

In an accumulator a lane owns two neighbouring columns of each group of 8, so a row would leave in pieces of
4 bytes. Where shared memory is left, a warp turns its 16 rows round there (``StagedStore``); else the four
lanes of a row exchange registers (``ExchangedStore``). Neither waits for another warp.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import math
from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.exchange import QUAD, store_exchanged
from attn4.kernels.dsl.staging import Staging
from attn4.kernels.shared.softmax import to_operand


class Store(Fixed):
    """Writes the rows of a tile that exist."""

    def __init__(self, plan, bounds, outputs):
        self.plan = plan
        self.bounds = bounds
        self.out = outputs.out
        self.lse = outputs.lse

    def out_row(self, tile, position, head):
        """The row of the output tensor."""
        if self.plan.cu_seqlens_q:
            return self.out[tile.q_begin + position, head, None]
        return self.out[tile.batch, position, head, None]

    @cute.jit
    def store_lse(self, tile, lse, rows):
        """Write the LSE of this thread's two rows; one lane of each quad does."""
        if cutlass.const_expr(self.lse is not None):
            for half in cutlass.range_constexpr(2):
                position, head = self.bounds.place(tile, rows[half])
                if position < tile.q_rows and cute.arch.lane_idx() % QUAD == 0:
                    if cutlass.const_expr(self.plan.cu_seqlens_q):
                        self.lse[head, tile.q_begin + position] = lse[half]
                    else:
                        self.lse[tile.batch, head, position] = lse[half]


class StagedStore(Store):
    """Rows turned round in ``staging``, 16 of each warp, and written whole."""

    def __init__(self, plan, bounds, outputs, staging: Staging):
        super().__init__(plan, bounds, outputs)
        self.staging = staging

    @cute.jit
    def __call__(self, tile, output, lse, rows):
        """``output`` is a normalised accumulator; ``lse`` and ``rows`` belong to its two rows."""
        rounded = cute.make_rmem_tensor(output.layout, self.out.element_type)
        to_operand(output, rounded)
        self.staging.put(rounded)
        self.store_lse(tile, lse, rows)
        self.staging.write(partial(self._place, tile))

    def _place(self, tile, row):
        position, head = self.bounds.place(tile, row)
        return self.out_row(tile, position, head), position < tile.q_rows


class ExchangedStore(Store):
    """Registers exchanged within a quad: each lane ends with 8 consecutive columns, a quad with 64 bytes."""

    @cute.jit
    def __call__(self, tile, output, lse, rows):
        """``output`` is a normalised accumulator; ``lse`` and ``rows`` belong to its two rows."""
        words = [
            math.pack(output[2 * i], output[2 * i + 1], self.out.element_type)
            for i in range(cute.size(output) // 2)
        ]
        for half in cutlass.range_constexpr(2):
            self._store_row(tile, rows[half], words[half::2])
        self.store_lse(tile, lse, rows)

    @cute.jit
    def _store_row(self, tile, row, words):
        position, head = self.bounds.place(tile, row)
        target = self.out_row(tile, position, head)
        store_exchanged(words, target, position < tile.q_rows)
