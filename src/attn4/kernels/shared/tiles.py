"""What a tile of work is, and which key blocks it visits."""

from __future__ import annotations

from dataclasses import dataclass, fields

import cutlass
import cutlass.cute as cute
from cutlass import Int32

END_OF_WORK = -1
"""The row block of the record that ends every role's loop."""


@dataclass(frozen=True)
class TileRecord:
    """One tile, as the scheduler announces it: every length is already read from the device.

    Rows ``row_block * tile_m`` on of the sequence ``batch`` and query head ``head``. The sequence has
    ``q_rows`` rows to write from ``q_begin`` on, of which the first ``q_len`` are queries; its ``k_len``
    keys start at ``k_begin``. Key blocks ``n_begin`` to ``n_end`` - 1 hold all the keys that the tile sees.
    """

    row_block: Int32
    head: Int32
    batch: Int32
    q_begin: Int32
    q_rows: Int32
    q_len: Int32
    k_begin: Int32
    k_len: Int32
    n_begin: Int32
    n_end: Int32

    def write(self, words):
        """Store to shared memory; by one thread."""
        for position, field in enumerate(fields(self)):
            words[position] = getattr(self, field.name)


@cute.jit
def read_record(words):
    """Load the announced tile: one lane reads for its warp, so that its arrival alone frees the record."""
    count = len(fields(TileRecord))
    held = cute.make_rmem_tensor(count, Int32)
    if cute.arch.lane_idx() == 0:
        for position in cutlass.range_constexpr(count):
            held[position] = words[position]
    return TileRecord(*[cute.arch.shuffle_sync(held[position], offset=0) for position in range(count)])


@dataclass(frozen=True)
class Bounds:
    """Which keys a query sees: the mask kind is compiled in, a window's bounds arrive with the call."""

    kind: str
    tile_m: int
    tile_n: int
    pack: int
    left: Int32
    right: Int32

    def position(self, row):
        """The query position of a row of a tile: ``pack`` heads share a position."""
        return row // self.pack if self.pack > 1 else row

    def position_in(self, tile, row):
        """The query position of row ``row`` of ``tile``."""
        return self.position(tile.row_block * self.tile_m + row)

    @cute.jit
    def place(self, tile, row):
        """Position and query head of row ``row`` of ``tile``."""
        row = tile.row_block * self.tile_m + row
        position = self.position(row)
        head = tile.head
        if cutlass.const_expr(self.pack > 1):
            head = tile.head * self.pack + row - position * self.pack
        return position, head

    def end_key(self, position, tile):
        """One past the last key that the query at ``position`` sees."""
        diagonal = position + tile.k_len - tile.q_len + 1
        if self.kind == "causal":
            return cutlass.min(diagonal, tile.k_len)
        if self.kind == "window":
            return cutlass.min(diagonal + self.right, tile.k_len)
        return tile.k_len

    def begin_key(self, position, tile):
        """The first key that the query at ``position`` sees."""
        return position + tile.k_len - tile.q_len - self.left

    def visited(self, row_block, q_len, k_len):
        """Key blocks [first, last) that some query of the row block sees; empty if first >= last."""
        first_row = self.position(row_block * self.tile_m)
        last_row = cutlass.min(self.position((row_block + 1) * self.tile_m - 1), q_len - 1)
        end = k_len
        begin = Int32(0)
        if self.kind != "full":
            right = self.right if self.kind == "window" else 0
            end = cutlass.min(end, last_row + k_len - q_len + 1 + right)
        if self.kind == "window":
            begin = cutlass.max(begin, first_row + k_len - q_len - self.left)
        # A row block past the queries sees nothing.
        end = end * Int32(first_row < q_len)
        return begin // self.tile_n, (cutlass.max(end, 0) + self.tile_n - 1) // self.tile_n

    def met(self, tile, rows):
        """Key blocks [first, last) of ``tile`` that the rows from ``rows[0]`` to ``rows[1]`` of it see; one
        block at least.
        """
        if self.kind == "full":
            return tile.n_begin, tile.n_end
        first_row = self.position_in(tile, rows[0])
        last_row = cutlass.min(self.position_in(tile, rows[1]), tile.q_len - 1)
        end = (cutlass.max(self.end_key(last_row, tile), 0) + self.tile_n - 1) // self.tile_n
        end = cutlass.max(cutlass.min(end, tile.n_end), tile.n_begin + 1)
        begin = tile.n_begin
        if self.kind == "window":
            begin = cutlass.max(begin, cutlass.max(self.begin_key(first_row, tile), 0) // self.tile_n)
        return cutlass.min(begin, end - 1), end

    def unmasked(self, tile, rows=None):
        """Key blocks [first, last) of which every query of the tile sees every key, or every query from
        ``rows[0]`` to ``rows[1]`` of it.
        """
        first, last = rows or (0, self.tile_m - 1)
        first_row = self.position_in(tile, first)
        last_row = self.position_in(tile, last)
        last = cutlass.max(self.end_key(first_row, tile), 0) // self.tile_n
        first = Int32(0)
        if self.kind == "window":
            first = (cutlass.max(self.begin_key(last_row, tile), 0) + self.tile_n - 1) // self.tile_n
        return first, last
