"""Tensor memory as the plan lays it out, and how threads read and write rows of it.

A CTA has 128 lanes of 512 columns of 32 bits. Thread t of a warpgroup reaches the lanes of its warp, and
moves consecutive columns of lane t (PTX ISA, tcgen05.ld and tcgen05.st, shape .32x32b).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cutlass_dsl import dsl_user_op

from attn4.kernels.dsl.carried import Fixed
from attn4.kernels.dsl.smem import offset_of

LANES = 128
COLUMNS = 512
LOG2_WARP = 5
LOG2_LANE_STRIDE = 16
LANE_STRIDE = 1 << LOG2_LANE_STRIDE
"""An address is lane << 16 | column."""

TENSOR_MEMORY = 6
"""The address space of PTX that LLVM gives this number."""

SHAPE = nvvm.Tcgen05LdStShape.SHAPE_32X32B


class TensorArena(Fixed):
    """The tensor memory of a CTA, cut up by ``plan.buffers``. ``address`` is a word of shared memory."""

    def __init__(self, plan, address):
        self.plan = plan
        self.address = address
        self.base = None

    @property
    def paired(self) -> bool:
        """Whether both CTAs of a pair take and give back together."""
        return self.plan.cta_group == 2

    def allocate(self):
        """Take all columns; by one warp, before ``open``."""
        cute.arch.alloc_tmem(COLUMNS, self.address, self.paired)

    def open(self):
        """Learn where the columns are; by every thread, after a barrier behind ``allocate``."""
        self.base = cute.arch.retrieve_tmem_ptr(Float32, 16, self.address)

    def free(self):
        """Give the columns back; by the warp that took them, when nothing uses them any more."""
        cute.arch.relinquish_tmem_alloc_permit(self.paired)
        cute.arch.dealloc_tmem(self.base, COLUMNS, self.paired)

    def pointer(self, name: str, slot=0):
        """Start of a slot of the buffer ``name``."""
        buffer = self.plan.buffer(name)
        start = self.base + buffer.offset
        return start if buffer.stages == 1 else start + slot * (buffer.size // buffer.stages)

    def columns(self, name: str, tile, slot=0):
        """A slot of the buffer ``name`` of query tile ``tile`` as (lanes, columns) of 32 bits; see
        `offset_of`.
        """
        buffer = self.plan.buffer(f"{name}0")
        count = buffer.size // buffer.stages
        start = self.base + offset_of(self.plan, name, tile)
        if buffer.stages > 1:
            start = start + slot * count
        return cute.make_tensor(start, cute.make_layout((LANES, count), stride=(LANE_STRIDE, 1)))

    def lanes(self, name: str, at=0):
        """The buffer ``name`` from column ``at`` on as (lanes, columns) of 32 bits."""
        layout = cute.make_layout((LANES, self.plan.buffer(name).size), stride=(LANE_STRIDE, 1))
        return cute.make_tensor(self.pointer(name) + at, layout)

    def accumulator(self, name: str, tiled_mma, slot=0):
        """A slot of the buffer ``name`` as the accumulator of a product, this CTA's rows of it."""
        fragment = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(self._shape(name)))
        return cute.make_tensor(self.pointer(name, slot), fragment.layout)

    def operand(self, name: str, tiled_mma, dtype, slot=0):
        """A slot of the buffer ``name`` as operand A of a product, this CTA's rows of it."""
        fragment = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A(self._shape(name)))
        return cute.make_tensor(cute.recast_ptr(self.pointer(name, slot), dtype=dtype), fragment.layout)

    def operand_in_halves(self, name: str, tiled_mma, dtype):
        """Operand A of a product, halves of its inner dimension in the buffers ``name0`` and ``name1``."""
        first, second = self.plan.buffer(f"{name}0"), self.plan.buffer(f"{name}1")
        rows, columns = first.shape
        whole = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((rows, 2 * columns))).layout
        element, group, step = whole.stride
        distance = (second.offset - first.offset) * Float32.width // dtype.width
        steps = (cute.size(whole, mode=[2]) // 2, 2)
        layout = cute.make_layout((*whole.shape[:2], steps), stride=(element, group, (step, distance)))
        return cute.make_tensor(cute.recast_ptr(self.pointer(f"{name}0"), dtype=dtype), layout)

    def _shape(self, name: str):
        """Rows of all CTAs, and columns."""
        rows, columns = self.plan.buffer(name).shape
        return rows * self.plan.cta_group, columns


@dsl_user_op
def load(columns, first: int, registers, thread, *, loc=None, ip=None):
    """Start to read columns from ``first`` on of this thread's lane into float32 ``registers``.

    As one operation, where a partitioned copy takes the compiler ten times as long for the same instruction.
    """
    count = cute.size(registers)
    kind = ir.VectorType.get([count], Int32.mlir_type)
    read = nvvm.tcgen05_ld(kind, SHAPE, _address(columns, first, thread), loc=loc, ip=ip)
    words = cute.recast_tensor(registers, Int32)
    words.store(cute.TensorSSA(read, words.shape, Int32), loc=loc, ip=ip)


@dsl_user_op
def store(registers, columns, first: int, thread, *, loc=None, ip=None):
    """Start to write float32 ``registers`` to consecutive columns from ``first`` on of this thread's lane."""
    words = cute.recast_tensor(registers, Int32).load(loc=loc, ip=ip)
    nvvm.tcgen05_st(SHAPE, _address(columns, first, thread), words.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


def _address(columns, first: int, thread):
    """Column ``first`` of the first lane that the thread's warp reaches."""
    lanes = (thread >> LOG2_WARP) << (LOG2_WARP + LOG2_LANE_STRIDE)
    address = columns.iterator.toint() + (lanes + first)
    return llvm.inttoptr(llvm.PointerType.get(TENSOR_MEMORY), address.ir_value())


wait_loads = cute.arch.fence_view_async_tmem_load
"""Wait for what this warp reads; its registers are not to be touched before."""

wait_stores = cute.arch.fence_view_async_tmem_store
"""Wait for what this warp writes."""


@dsl_user_op
def before_arrive(*, loc=None, ip=None):
    """Order this thread's accesses to tensor memory before an arrival that follows."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def after_wait(*, loc=None, ip=None):
    """Order this thread's accesses to tensor memory after a wait that precedes."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)
