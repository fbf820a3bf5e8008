"""The steps of a tile of keys: each a query head of its group and a block of queries."""

from __future__ import annotations

from cutlass import Int32

from attn4.kernels.dsl.carried import Carried
from attn4.kernels.shared.key_tiles import first_query_block, following_query_block


class Walk(Carried):
    """Where a role is in the steps of a tile: ``member`` of the group of query heads, and query block.

    ``number`` counts them; -1 is the step of zeros before the first. Without a turned end all blocks of a
    head are taken, upwards, then those of the next head. With one it is all heads of a block, then of the
    next, as descending tiles begin with the same block: they wait for each other there, but at no other.
    """

    carried = ("number", "member", "block")

    def __init__(self, plan, tile, group: Int32):
        self.plan = plan
        self.tile = tile
        self.group = group
        self.begin = first_query_block(plan, tile)
        if plan.schedule.turned_end:
            self.begin = tile.first + tile.descending * (tile.last - 1 - tile.first)
        self.number = Int32(0)
        self.member = Int32(0)
        self.block = self.begin

    def at(self, number, member, block) -> Walk:
        """The same tile at another step."""
        return self.__new_from_mlir_values__([x.ir_value() for x in (number, member, block)])

    def before(self) -> Walk:
        """The step of zeros."""
        return self.at(Int32(-1), self.member, self.block)

    def following(self) -> Walk:
        """The next step."""
        if self.plan.schedule.turned_end:
            member = self.member + 1
            wraps = Int32(member == self.group)
            block = self.block + wraps * (1 - 2 * self.tile.descending)
            return self.at(self.number + 1, member - wraps * self.group, block)
        block = following_query_block(self.tile, self.block)
        return self.at(self.number + 1, self.member + Int32(block == self.begin), block)

    @property
    def steps(self):
        """How many there are."""
        return (self.tile.last - self.tile.first) * self.group
