"""Shared memory as the plan lays it out: tensors and barriers by name."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator
from cutlass.utils.hopper_helpers import get_smem_layout_atom

from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.channel import Ring
from attn4.kernels.dsl.pair import Pair

ALIGNMENT = 1024
"""Swizzle atoms repeat every 1024 bytes of the absolute address."""


def row_major_layout(shape, stages: int, dtype, part: int | None = None):
    """(rows, columns, stages) of row-major tiles in the widest swizzle that divides a row, or that divides
    ``part`` columns of it, where tiles of so many lie side by side.
    """
    kind = get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, part or shape[1])
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (*shape, stages), order=(0, 1, 2))


class Arena(Fixed):
    """The dynamic shared memory of a CTA, cut up by ``plan.buffers``."""

    def __init__(self, plan):
        self.plan = plan
        self.base = SmemAllocator().allocate(plan.shared_bytes, ALIGNMENT)

    def pointer(self, name: str, dtype):
        """Start of the buffer ``name``."""
        return self.at(self.plan.buffer(name).offset, dtype)

    def at(self, offset, dtype):
        """The place ``offset`` bytes from the start."""
        return cute.recast_ptr(self.base + offset, dtype=dtype)

    def words(self, name: str):
        """The buffer ``name`` as a vector of int32."""
        return cute.make_tensor(
            self.pointer(name, cutlass.Int32), cute.make_layout(self.plan.buffer(name).shape[0])
        )

    def rows(self, name: str, dtype, tile=0):
        """The buffer ``name`` as a (rows, columns) tensor without a swizzle; ``tile`` as in `offset_of`."""
        pointer = self.at(offset_of(self.plan, name, tile), dtype)
        shape = self.plan.buffer(f"{name}0").shape
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=(shape[1], 1)))

    def tile(self, name: str, layout, dtype, at=0):
        """The buffer ``name`` from byte ``at`` on, a multiple of ``ALIGNMENT``, as a tensor with the swizzle
        of ``layout`` moved into its pointer.
        """
        start = (self.base + (self.plan.buffer(name).offset + at)).align(ALIGNMENT)
        return cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=dtype), layout.outer)

    def rings(self, pair=None) -> dict[str, Ring]:
        """A ring for each channel that has barriers in shared memory, by default of a CTA alone."""
        pointer = self.pointer("barriers", cutlass.Int64)
        rings = {}
        alone = Pair(1)
        number = 0
        for channel in self.plan.channels:
            if channel.kind != "named":
                crossing = pair is not None and self.plan.crosses(channel)
                returns = crossing and self.plan.role(channel.producer).leader_only
                rings[channel.name] = Ring(
                    channel,
                    pointer + number,
                    number,
                    pair if crossing else alone,
                    pair if returns else alone,
                )
                number += channel.stages * (1 + (channel.empty_arrivals > 0))
        return rings


def swizzled_address(rows):
    """The address of the first element of ``rows``, whose pointer has the swizzle of rows of 128 bytes: which
    eighth of the row it is in, bits 4 to 6, is exclusive-ored with the number of the row, bits 7 to 9.

    So one register serves all eighths of a row: they are the address with one of these bits changed.
    """
    plain = rows.iterator.toint()
    return plain ^ ((plain >> 3) & 0x70)


def load_pair(address, offset: int):
    """The two float32 that lie ``offset`` bytes from ``address``."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0} + OFFSET];".replace("OFFSET", str(offset)),
        write_only_types=[cutlass.Float32, cutlass.Float32],
        read_only_args=[address],
    )


def store_matrices(address, offset: int, words):
    """Write four matrices of 8 x 8 16-bit elements, whose rows each lane of eight has the address of."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0} + OFFSET], {{$r1}, {$r2}, {$r3}, {$r4}};".replace(
            "OFFSET", str(offset)
        ),
        read_only_args=[address, *words],
    )


def offset_of(plan, name: str, tile):
    """Offset of the buffer ``name0``, ``name1``, ... of query tile ``tile``, which may be known only on the
    device.
    """
    first = plan.buffer(f"{name}0").offset
    if plan.query_tiles == 1:
        return first
    return first + tile * (plan.buffer(f"{name}1").offset - first)


def transposed(tensor):
    """(rows, columns, stages) seen as (columns, rows, stages)."""
    rows, columns, stages = tensor.shape
    order = cute.make_ordered_layout((columns, rows, stages), order=(1, 0, 2))
    return cute.composition(tensor, order)
