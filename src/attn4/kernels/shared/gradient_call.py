"""What a backward kernel of either machine is called with."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.dsl import tma
from attn4.kernels.shared.call import TileKernel
from attn4.kernels.shared.key_tiles import KeyBounds


@dataclass(frozen=True)
class Results:
    """What the forward pass left and what arrives from outside; ``dlse`` is None in a kernel without it."""

    out: cute.Tensor
    dout: cute.Tensor
    lse: cute.Tensor
    dlse: cute.Tensor | None


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
        return KeyBounds(plan.mask, plan.tile_m, plan.tile_n, scalars.window_left, scalars.window_right)

    def row_tiles(self, arena, copies) -> dict[str, tma.RowTiles]:
        """The copies of Q, K, V and dO into their slots, and of dK and dV out of theirs."""
        bounded = {
            "query": self.bounded_queries,
            "dout": self.bounded_queries,
            "key": self.bounded_keys,
            "value": self.bounded_keys,
            "dk_out": self.plan.cu_seqlens_k,
            "dv_out": self.plan.cu_seqlens_k,
        }
        found = {}
        for name, ends in bounded.items():
            copy = getattr(copies, name)
            found[name] = tma.RowTiles(copy.atom, copy.rows, self.tile(arena, name), bounded=ends)
        return found
