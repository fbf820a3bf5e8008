"""What a kernel of either machine is called with, and how its plan names tiles and copies."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32

from attn4.kernels.dsl import tma
from attn4.kernels.dsl.smem import row_major_layout
from attn4.kernels.shared.scheduler import Lengths
from attn4.kernels.shared.tiles import Bounds

DTYPES = {"bfloat16": BFloat16, "float16": Float16}


@dataclass(frozen=True)
class Outputs:
    """Where results go; ``lse`` is None in a kernel without it."""

    out: cute.Tensor
    lse: cute.Tensor | None
    counter: cute.Tensor | None


@dataclass(frozen=True)
class Scalars:
    """Numbers of a call: score scale in log2 units and the window's bounds."""

    scale_log2: Float32
    window_left: Int32
    window_right: Int32


class TileKernel:
    """A kernel of one plan that works on tiles of rows, without its roles."""

    def __init__(self, plan):
        self.plan = plan
        self.dtype = DTYPES[plan.dtype]

    @property
    def bounded_keys(self) -> bool:
        """Whether a sequence's keys can end before the tensor does."""
        return self.plan.cu_seqlens_k or self.plan.seqused_k

    def thread(self, role):
        """Number of this thread in its role."""
        return cute.arch.thread_idx()[0] - role.first_warp * cute.arch.WARP_SIZE

    def slots(self, name: str) -> str:
        """The buffer that holds the tiles of ``name``."""
        has_own = any(buffer.name == name for buffer in self.plan.buffers)
        return name if has_own else "key_value"

    def layout(self, name: str):
        """Shared-memory layout of the tiles of ``name``."""
        buffer = self.plan.buffer(self.slots(name))
        return row_major_layout(buffer.shape, buffer.stages, self.dtype)

    def tile(self, arena, name: str):
        """The tiles of ``name`` as a tensor."""
        return arena.tile(self.slots(name), self.layout(name), self.dtype)

    def atom(self, name: str, rows, direction=None):
        """The copy of tiles of ``name``, by default a load; query and output rows may be those of a group of
        heads.
        """
        direction = direction or (tma.LOAD if self.plan.cta_group == 1 else tma.LOAD_OF_PAIR)
        shape = self.plan.buffer(self.slots(name)).shape
        if self.plan.pack_gqa > 1 and name in ("query", "out"):
            return tma.packed_copy_atom(rows, self.layout(name), shape, self.plan.pack_gqa, direction)
        return tma.copy_atom(rows, self.layout(name), shape, direction)

    def lengths(self, query, key, vectors) -> Lengths:
        """Of the call with these (rows, dim, heads, batch) tensors and length vectors."""
        cu_seqlens_q = vectors[0]
        batch = cu_seqlens_q.shape[0] - 1 if self.plan.cu_seqlens_q else query.shape[3]
        heads = query.shape[2] // self.plan.pack_gqa
        return Lengths(batch, heads, heads // key.shape[2], query.shape[0], key.shape[0], *vectors)


class ForwardKernel(TileKernel):
    """The forward kernel of one plan, without its roles."""

    def row_tiles(self, arena, copies, rank=0):
        """The copies of Q, K and V into their slots, by CTA ``rank`` of its group."""
        query, key, value = (self.tile(arena, name) for name in ("query", "key", "value"))
        pack, bounded = self.plan.pack_gqa, self.bounded_keys
        keys, columns = (self.plan.cta_group, rank, 0), (1, 0, rank)
        return (
            tma.RowTiles(copies.query, copies.query_rows, query, pack=pack),
            tma.RowTiles(copies.key, copies.key_rows, key, bounded=bounded, share=keys),
            tma.RowTiles(copies.value, copies.value_rows, value, bounded=bounded, share=columns),
        )

    def bounds(self, scalars: Scalars) -> Bounds:
        """Which keys a query sees."""
        plan = self.plan
        return Bounds(
            plan.mask, plan.tile_m, plan.tile_n, plan.pack_gqa, scalars.window_left, scalars.window_right
        )
