"""The tiles of a CTA, as every role follows them: announced by the scheduling warp, or counted."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from attn4.kernels.dsl.carried import Carried
from attn4.kernels.shared.tiles import read_record


class TileStream(Carried):
    """One role's place in the sequence of tiles.

    Where a scheduling warp announces tiles, the record of the next one is read from ``words`` once
    ``announced`` says so; else ``announced`` is None and every role finds its tiles by number.
    """

    def __init__(self, plan, order, words, announced):
        self.plan = plan
        self.order = order
        self.words = words
        self.announced = announced
        self.number = cute.arch.block_idx()[0]
        self.carried = ("number",) if announced is None else ("announced",)


@cute.jit
def next_tile(stream):
    """(stream, tile): the next tile; its row block is ``END_OF_WORK`` after the last."""
    stream, tile = hold_tile(stream)
    stream = release_tile(stream)
    return stream, tile


@cute.jit
def hold_tile(stream):
    """As `next_tile`, but no tile after this one is taken before `release_tile`.

    The role that holds its record until it is nearly done has the scheduler take the next tile as late as its
    latency allows. Taken at the start, a long tile would hold back another that an idle CTA could run (16k
    causal on an H200: 9% at D 128, 15% at D 256).
    """
    if cutlass.const_expr(stream.announced is not None):
        stream.announced.wait()
        tile = read_record(stream.words)
    else:
        tile = stream.order.find(stream.number)
        stream.number = Int32(stream.number + cute.arch.grid_dim()[0])
    return stream, tile


@cute.jit
def release_tile(stream):
    """Let the scheduler announce the tile after the one held."""
    if cutlass.const_expr(stream.announced is not None):
        stream.announced.arrive()
        stream.announced.advance()
    return stream
