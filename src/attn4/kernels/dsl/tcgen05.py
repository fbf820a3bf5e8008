"""Matrix products of Blackwell's tensor core (tcgen05), accumulated in tensor memory and issued by one
thread.

A product of M = 128 rows keeps row i of its accumulator in lane i and column j in column j; operand A in
tensor memory holds two 16-bit elements a column. Products of one thread execute in the order of issue.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05
from cutlass.utils.blackwell_helpers import make_trivial_tiled_mma

K_MAJOR = tcgen05.OperandMajorMode.K
MN_MAJOR = tcgen05.OperandMajorMode.MN
SHARED = tcgen05.OperandSource.SMEM
TENSOR = tcgen05.OperandSource.TMEM
GROUPS = {1: tcgen05.CtaGroup.ONE, 2: tcgen05.CtaGroup.TWO}

STEP = 16
"""Elements of the inner dimension that one instruction takes."""


def tiled_product(dtype, shape, b_major, a_source, cta_group: int = 1, a_major=K_MAJOR):
    """A product of ``shape`` (rows, columns), the rows shared by the CTAs of the group."""
    return make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, GROUPS[cta_group], shape, a_source)


def shared_product(dtype, shape, b_major, a_source, cta_group: int, a_major=K_MAJOR):
    """A product whose CTAs have ``shape`` (rows, columns) of the result each, and how one CTA's operands in
    shared memory are cut up.

    Of a pair each CTA holds operand A of its own rows, and operand B of half of the columns.
    """
    rows, columns = shape
    whole = tiled_product(dtype, (rows * cta_group, columns), b_major, a_source, cta_group, a_major)
    mine = tiled_product(dtype, (rows, columns // cta_group), b_major, a_source, a_major=a_major)
    return whole, mine.get_slice(0)


@cute.jit
def issue(tiled_mma, acc, operands, steps: cutlass.Constexpr, accumulate):
    """Start ``acc (+)= a b`` over the ``steps`` of the inner dimension; without ``accumulate`` the first of
    all overwrites ``acc``.
    """
    a, b = operands
    atom = cute.make_mma_atom(tiled_mma.op)
    for k in cutlass.range_constexpr(*steps):
        atom.set(tcgen05.Field.ACCUMULATE, accumulate if cutlass.const_expr(k == 0) else True)
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)


def commit(barrier, cta_group: int = 1):
    """Arrive at ``barrier`` of every CTA of the group when all products that this thread has issued are
    complete.
    """
    everyone = None if cta_group == 1 else (1 << cta_group) - 1
    tcgen05.commit(barrier, everyone, GROUPS[cta_group])
