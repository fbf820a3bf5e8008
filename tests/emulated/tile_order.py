"""A kernel that only asks in which order tiles are taken; the DSL reads its source from this file."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.shared.key_tiles import KeyBounds, find_key_tile
from attn4.kernels.shared.scheduler import Lengths, TileOrder
from attn4.kernels.shared.tiles import Bounds


class OrderProbe:
    """One warp writes (row block, head, sequence, key blocks) of tile 0, ``step``, ... of a plan."""

    def __init__(self, plan, step=1):
        self.plan = plan
        self.step = step

    @cute.jit
    def __call__(self, out, sizes, window, vectors):
        self.kernel(out, sizes, window, vectors).launch(grid=[1, 1, 1], block=[32, 1, 1])

    @cute.kernel
    def kernel(self, out: cute.Tensor, sizes, window, vectors):
        plan = self.plan
        bounds = Bounds(plan.mask, plan.tile_m, plan.tile_n, plan.pack_gqa, window[0], window[1])
        order = TileOrder(plan, bounds, Lengths(*sizes, *vectors))
        for entry in cutlass.range(out.shape[0], unroll=1):
            tile = order.find(entry * Int32(self.step))
            if cute.arch.lane_idx() == 0:
                out[entry, 0] = tile.row_block
                out[entry, 1] = tile.head
                out[entry, 2] = tile.batch
                out[entry, 3] = cutlass.max(tile.n_end - tile.n_begin, 0)


class KeyOrderProbe:
    """One warp writes (key block, head, sequence, first, last, whether descending, turn at query block 0, 1,
    ...) of each tile of keys.
    """

    def __init__(self, plan):
        self.plan = plan

    @cute.jit
    def __call__(self, out, sizes, window):
        self.kernel(out, sizes, window).launch(grid=[1, 1, 1], block=[32, 1, 1])

    @cute.kernel
    def kernel(self, out: cute.Tensor, sizes, window):
        plan = self.plan
        bounds = KeyBounds(plan.mask, plan.tile_m, plan.tile_n, window[0], window[1])
        lengths = Lengths(*sizes, None, None, None, None)
        for entry in cutlass.range(out.shape[0], unroll=1):
            tile = find_key_tile(plan, bounds, lengths, entry)
            if cute.arch.lane_idx() == 0:
                out[entry, 0] = tile.key_block
                out[entry, 1] = tile.kv_head
                out[entry, 2] = tile.batch
                out[entry, 3] = tile.first
                out[entry, 4] = tile.last
                out[entry, 5] = Int32(0) if cutlass.const_expr(tile.descending is None) else tile.descending
                for block in cutlass.range(tile.first, tile.last, unroll=1):
                    out[entry, 6 + block] = bounds.turn(tile, block)
