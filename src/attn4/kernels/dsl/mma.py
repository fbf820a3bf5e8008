"""Warpgroup matrix products (wgmma): operands in shared memory or registers, accumulators in registers.

An accumulator of M = 64 rows and N columns gives thread ``4 * g + t`` of warp ``w`` the elements
(16 w + g + 8 h, 8 j + 2 t + e) at the register 4 j + 2 h + e (PTX ISA, "Register fragments for
wgmma.mma_async.m64nNk16"). Operand A takes its registers in the same order, two elements a register.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

K_MAJOR = warpgroup.OperandMajorMode.K
MN_MAJOR = warpgroup.OperandMajorMode.MN
SHARED = warpgroup.OperandSource.SMEM
REGISTERS = warpgroup.OperandSource.RMEM

GROUP_THREADS = 128
"""Threads of a warpgroup."""

GROUP_ROWS = 64
"""Rows of a warpgroup's product."""


def tiled_product(dtype, groups, columns: int, b_major, a_source, a_major=K_MAJOR):
    """A product of 64 rows and ``columns`` a warpgroup.

    ``groups`` warpgroups split M, or of a pair (over M, over N) both.
    """
    over_m, over_n = groups if isinstance(groups, tuple) else (groups, 1)
    return make_trivial_tiled_mma(
        dtype,
        dtype,
        a_major,
        b_major,
        Float32,
        atom_layout_mnk=(over_m, over_n, 1),
        tiler_mn=(64, columns),
        a_source=a_source,
    )


def accumulator(tiled_mma, shape):
    """A new float32 accumulator fragment for a (rows, columns) tile."""
    return cute.make_rmem_tensor(tiled_mma.partition_shape_C(shape), Float32)


def first_row(thread):
    """The first of the two rows that ``thread`` of the warpgroups holds; the other is 8 further on."""
    return thread // 32 * 16 + thread % 32 // 4


def group_rows(group):
    """The first and the last row of warpgroup ``group``."""
    return group * GROUP_ROWS, (group + 1) * GROUP_ROWS - 1


def by_row(fragment):
    """An accumulator fragment seen as (2 rows, columns of this thread)."""
    columns = cute.size(fragment) // 4
    layout = cute.make_layout((2, (2, columns)), stride=(2, (1, 4)))
    return cute.make_tensor(fragment.iterator, layout)


def rows_split(rows: int, groups: int) -> bool:
    """Whether ``groups`` warpgroups split the rows of an accumulator, as there are 64 for each, or else its
    columns.
    """
    return rows == GROUP_ROWS * groups


def side_by_side(shape, groups: int):
    """Offset of element (row, column) of an accumulator kept in memory as threads hold it: of every four
    registers those of all threads side by side.

    ``groups`` warpgroups split the rows or the columns: `rows_split`.
    """
    rows, columns = shape
    threads = GROUP_THREADS * groups
    row = ((8, 2, 4), (16, 2, 128))
    column = ((2, 4, columns // 8), (1, 4, 4 * threads))
    if rows_split(rows, groups):
        row = ((*row[0], groups), (*row[1], 512))
    else:
        column = ((2, 4, columns // 8 // groups, groups), (*column[1], 512))
    return cute.make_layout((row[0], column[0]), stride=(row[1], column[1]))


@cute.jit
def start(tiled_mma, acc, a, b, zero: cutlass.Constexpr[bool]):
    """Issue ``acc (+)= a b`` as one group; ``wait`` before its registers are touched."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in cutlass.range_constexpr(cute.size(a.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def wait(pending: int):
    """Wait until at most ``pending`` committed groups of this warpgroup are unfinished."""
    warpgroup.wait_group(pending)
