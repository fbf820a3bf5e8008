"""What a backward kernel of either machine is called with."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import tma
from attn4.kernels.dsl.carried import Bundle
from attn4.kernels.dsl.channel import Consumer, Producer
from attn4.kernels.dsl.pair import LEADER
from attn4.kernels.shared.call import TileKernel
from attn4.kernels.shared.gradient_load import RowStats
from attn4.kernels.shared.key_tiles import KeyBounds

OPERANDS = ("query", "key", "value", "dout")

COLUMNS = "_columns"
"""What the names of buffers end with that hold half of an operand's columns."""


@dataclass(frozen=True)
class Copy:
    """A bulk copy: its atom and the coordinates of its tensor."""

    atom: cute.CopyAtom
    rows: cute.Tensor


@dataclass(frozen=True)
class Results:
    """What the forward pass left and what arrives from outside; ``dlse`` is None in a kernel without it."""

    out: cute.Tensor
    dout: cute.Tensor
    lse: cute.Tensor
    dlse: cute.Tensor | None


@dataclass(frozen=True)
class Gradients:
    """Where dK and dV go, (rows, dim, heads, batch)."""

    dk: cute.Tensor
    dv: cute.Tensor


@dataclass(frozen=True)
class Workspace:
    """What the kernels of one pass hand to each other (see `attn4.plan.workspace.Workspace`).

    ``minus_lse`` is in log2 units; it is -inf for rows that see no key and for rows past the queries, and so
    their probabilities are 0. ``minus_delta`` is dLSE - rowsum(dO * O), and 0 there.
    """

    minus_lse: cute.Tensor
    minus_delta: cute.Tensor
    dq_sum: cute.Tensor


@dataclass(frozen=True)
class GradientScalars:
    """Numbers of a call."""

    softmax_scale: Float32
    window_left: Int32
    window_right: Int32


class BackwardKernel(TileKernel):
    """The backward kernel of one plan, without its roles."""

    @property
    def bounded_queries(self) -> bool:
        """Whether a sequence's queries can end before the tensor does."""
        return self.plan.cu_seqlens_q or self.plan.seqused_q

    def bounds(self, scalars: GradientScalars) -> KeyBounds:
        """Which queries see a key."""
        plan = self.plan
        sides = scalars.window_left, scalars.window_right
        return KeyBounds(plan.mask, plan.tile_m, plan.tile_n, *sides, plan.cta_group)

    def operand_copies(self, query, key, value, dout) -> dict[str, Copy]:
        """The copies of Q, K, V and dO, (rows, dim, heads, batch), into shared memory."""
        if self.bounded_queries:
            query, dout = tma.bounded_rows(query), tma.bounded_rows(dout)
        if self.bounded_keys:
            key, value = tma.bounded_rows(key), tma.bounded_rows(value)
        operands = {"query": query, "key": key, "value": value, "dout": dout}
        return {
            name: Copy(*self.atom(name, operands[name.removesuffix(COLUMNS)])) for name in self.operand_slots
        }

    @property
    def operand_slots(self) -> list[str]:
        """The buffers of Q, K, V and dO, of a pair also those that hold half of their columns."""
        names = [buffer.name for buffer in self.plan.buffers]
        return [*OPERANDS, *(name + COLUMNS for name in OPERANDS if name + COLUMNS in names)]

    def share(self, name: str, rank):
        """What CTA ``rank`` of its group holds of an operand; see `tma.RowTiles`."""
        if name in ("key", "value"):
            return 1, 0, 0
        return (1, 0, rank) if name.endswith(COLUMNS) else (self.plan.cta_group, rank, 0)

    def operand_tiles(self, arena, copies, rank=LEADER) -> dict[str, tma.RowTiles]:
        """The copies of Q, K, V and dO into their slots, by CTA ``rank`` of its group."""
        bounded = {
            "query": self.bounded_queries,
            "dout": self.bounded_queries,
            "key": self.bounded_keys,
            "value": self.bounded_keys,
        }
        return {
            name: self.copy_tiles(
                arena, copies, name, bounded[name.removesuffix(COLUMNS)], self.share(name, rank)
            )
            for name in self.operand_slots
        }

    def copy_tiles(self, arena, copies, name: str, bounded: bool, share=(1, 0, 0)) -> tma.RowTiles:
        """The copies between a tensor and the slots of ``name``."""
        copy = getattr(copies, name)
        return tma.RowTiles(copy.atom, copy.rows, self.tile(arena, name), bounded=bounded, share=share)

    def statistics(self, arena):
        """Slots of the statistics of query blocks: (rows, LSE or delta, slots)."""
        buffer = self.plan.buffer("row_stats")
        kinds, rows = buffer.shape
        layout = cute.make_layout((rows, kinds, buffer.stages))
        return cute.make_tensor(arena.pointer("row_stats", Float32), layout)

    def row_stats(self, arena, workspace: Workspace):
        """The copies of statistics."""
        return RowStats((workspace.minus_lse, workspace.minus_delta), self.statistics(arena))

    def ends(self, rings, role: str):
        """What ``role`` takes and hands over."""
        ends = {}
        for name, ring in rings.items():
            if role in ring.channel.consumers:
                ends[name] = Consumer(ring)
            elif ring.channel.producer == role:
                ends[name] = Producer(ring)
        return Bundle(**ends)
