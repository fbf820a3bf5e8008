"""Finished dK and dV from shared to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute


@cute.jit
def store(tile, tiles, ends):
    """Copy dV and dK from shared to global memory; rows past the end of a sequence stay."""
    for name in cutlass.range_constexpr(2):
        rows = tiles["dk_out" if name else "dv_out"]
        end = ends.dk_out if name else ends.dv_out
        slot = end.wait()
        target = rows.of_sequence(tile.kv_head, tile.batch, tile.k_begin, tile.k_rows)
        rows.store(target, tile.key_block, slot)
        cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=False)
