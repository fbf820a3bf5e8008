"""The storing role: finished output tiles from shared to global memory, while the next tile is computed."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.shared.stream import next_tile
from attn4.kernels.shared.tiles import END_OF_WORK


@cute.jit
def store(stream, out, ends):
    """Follow the tiles; rows past the end of a sequence stay in shared memory."""
    plan = stream.plan
    stream, tile = next_tile(stream)
    while tile.row_block != END_OF_WORK:
        targets = out.of_sequence(tile.head, tile.batch, tile.q_begin, tile.q_rows)
        for i in cutlass.range_constexpr(plan.query_tiles):
            slot = ends.out.wait()
            out.store(targets, tile.row_block * plan.query_tiles + i, slot)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            ends.out.arrive_together()
            ends.out.advance()
        if cutlass.const_expr(plan.output_in_query):
            # An output tile is not as large as a query tile: the last may reach into each of these slots.
            for _ in cutlass.range_constexpr(plan.query_tiles):
                ends.query.arrive()
                ends.query.advance()
        stream, tile = next_tile(stream)
    cute.arch.cp_async_bulk_wait_group(0, read=False)
