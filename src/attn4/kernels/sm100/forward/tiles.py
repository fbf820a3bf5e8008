"""The tiles of a CTA, as every role follows them: announced by the scheduling warp, or counted."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl.carried import Carried
from attn4.kernels.shared.tiles import read_record


class TileStream(Carried):
    """One role's place in the sequence of tiles.

    With a dynamic schedule the record of the next tile is read from ``words`` once ``announced`` says so;
    with a static one every role finds its tiles by number.
    """

    def __init__(self, plan, order, words, announced):
        self.plan = plan
        self.order = order
        self.words = words
        self.announced = announced
        self.number = cute.arch.block_idx()[0]
        self.carried = ("announced",) if plan.schedule.dynamic else ("number",)


@cute.jit
def next_tile(stream):
    """(stream, tile): the next tile; its row block is ``END_OF_WORK`` after the last."""
    if cutlass.const_expr(stream.plan.schedule.dynamic):
        stream.announced.wait()
        tile = read_record(stream.words)
        stream.announced.arrive()
        stream.announced.advance()
    else:
        tile = stream.order.find(stream.number)
        stream.number = Int32(stream.number + cute.arch.grid_dim()[0])
    return stream, tile
