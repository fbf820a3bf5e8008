"""From a plan to a compiled kernel, with fake tensors: no GPU, no shape of any call."""

from __future__ import annotations

import tempfile

import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.shared.call import DTYPES
from attn4.kernels.shared.sort_batches import SortBatches
from attn4.kernels.sm90.backward.kernel import Backward as HopperBackward
from attn4.kernels.sm90.backward.wide import WideBackward as HopperWideBackward
from attn4.kernels.sm90.forward.kernel import Forward as HopperForward
from attn4.kernels.sm100.backward.kernel import Backward as BlackwellBackward
from attn4.kernels.sm100.backward.wide import WideBackward as BlackwellWideBackward
from attn4.kernels.sm100.forward.kernel import Forward as BlackwellForward
from attn4.plan.workspace import block_elements

BACKWARD = {"sm_90a": HopperBackward, "sm_100a": BlackwellBackward, "sm_103a": BlackwellBackward}
FORWARD = {"sm_90a": HopperForward, "sm_100a": BlackwellForward, "sm_103a": BlackwellForward}

STRIDE_DIVISIBILITY = 8
"""Strides in elements, so that rows of 16-bit elements begin at 16 bytes, as bulk copies need."""


def fake_rows(dtype, packed: bool):
    """A (batch, rows, heads, dim) or packed (rows, heads, dim) tensor of any shape and strides."""
    rank = 3 if packed else 4
    shape = tuple(cute.sym_int() for _ in range(rank))
    strides = tuple(cute.sym_int64(divisibility=STRIDE_DIVISIBILITY) for _ in range(rank - 1))
    return cute.runtime.make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=16)


def fake_integers(present: bool):
    """A vector of int32 of any length, or None."""
    if not present:
        return None
    return cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)


def fake_floats(rank: int):
    """A contiguous float32 tensor of any shape."""
    return cute.runtime.make_fake_compact_tensor(
        Float32,
        tuple(cute.sym_int() for _ in range(rank)),
        stride_order=tuple(reversed(range(rank))),
        assumed_align=4,
    )


def fake_workspace(rows: int):
    """A contiguous float32 tensor (heads, blocks, ``rows``), which may exceed 2^31 elements.

    The stride of a block is a number in the kernel: a step finds its block without a product of 64 bits.
    """
    shape = (cute.sym_int(), cute.sym_int(), rows)
    stride = (cute.sym_int64(divisibility=rows), rows, 1)
    return cute.runtime.make_fake_tensor(Float32, shape, stride=stride, assumed_align=16)


def compile_plan(plan):
    """Compile the kernel of ``plan``, or its kernels: one launch after the other, by one function.

    Returns the DSL's compiled function, to be called or exported through tvm-ffi, launching on the stream of
    the tensors' framework. Forward plans take the arguments

        q, k, v, out, lse, softmax_scale, window_left, window_right,
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, batch_order, counter, ctas

    where ``ctas`` is how many CTAs are launched at most (of pairs an odd one stays out, but one pair there
    is), backward plans

        q, k, v, out, dout, lse, dlse, dq, dk, dv, minus_lse, minus_delta, dq_sum,
        softmax_scale, window_left, window_right, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        counter, ctas

    and the kernel that sorts batches

        batch_order, rows_q, rows_k, window_left, window_right,
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k

    where rows are those of a padded sequence, and batch + 1 entries are written.

    Of a backward plan out and lse are the results of the forward pass, dout and dlse their incoming gradients
    (dlse None unless ``plan.lse``; dout finite, in rows that see no key too), and dq, dk, dv are written in
    full, in the dtype of q: zeros for rows of no sequence, past a stated length, or that see nothing. lse and
    dlse are contiguous float32, as the forward pass lays them out; tensors of rows have a last stride of
    1, other strides that are multiples of 8 elements (0 too, but for dq, dk, dv), and begin at 16 bytes.
    minus_lse, minus_delta and dq_sum are the kernels' own memory: uninitialised float32, contiguous, of the
    shapes that `attn4.plan.workspace` gives, from a multiple of 16 bytes on, which the next call on the same
    stream may use again. No size is 0.
    """
    if plan.kernel == "sort_batches":
        kernel, arguments = SortBatches, (fake_integers(True), *[Int32(0)] * 4, *fake_lengths(plan))
    elif plan.direction == "forward":
        kernel, arguments = FORWARD[plan.arch], forward_arguments(plan)
    elif plan.arch in BACKWARD:
        kernel, arguments = backward_kernel(plan), backward_arguments(plan)
    else:
        raise NotImplementedError(f"no backward kernel for {plan.arch} is built yet")
    with tempfile.TemporaryDirectory() as dump:
        return cute.compile(
            kernel(plan),
            *arguments,
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {plan.arch} --keep-ptx --dump-dir {dump}",
        )


def backward_kernel(plan):
    """The kernels of a backward plan; those of wide heads have other roles, or other products."""
    if plan.transposed_dq:
        return BlackwellWideBackward
    if any(role.name == "probability" for role in plan.roles):
        return HopperWideBackward
    return BACKWARD[plan.arch]


def forward_arguments(plan) -> tuple:
    """Fake arguments of a forward kernel."""
    dtype = DTYPES[plan.dtype]
    return (
        fake_rows(dtype, plan.cu_seqlens_q),
        fake_rows(dtype, plan.cu_seqlens_k),
        fake_rows(dtype, plan.cu_seqlens_k),
        fake_rows(dtype, plan.cu_seqlens_q),
        fake_floats(2 if plan.cu_seqlens_q else 3) if plan.lse else None,
        Float32(1.0),
        Int32(0),
        Int32(0),
        *fake_lengths(plan),
        fake_integers(plan.schedule.sorted_batches),
        *fake_grid(plan),
    )


def backward_arguments(plan) -> tuple:
    """Fake arguments of backward kernels."""
    dtype = DTYPES[plan.dtype]
    queries, keys, rank = plan.cu_seqlens_q, plan.cu_seqlens_k, 2 if plan.cu_seqlens_q else 3
    return (
        fake_rows(dtype, queries),
        fake_rows(dtype, keys),
        fake_rows(dtype, keys),
        fake_rows(dtype, queries),
        fake_rows(dtype, queries),
        fake_floats(rank),
        fake_floats(rank) if plan.lse else None,
        fake_rows(dtype, queries),
        fake_rows(dtype, keys),
        fake_rows(dtype, keys),
        fake_workspace(plan.tile_m),
        fake_workspace(plan.tile_m),
        fake_workspace(block_elements(plan)),
        Float32(1.0),
        Int32(0),
        Int32(0),
        *fake_lengths(plan),
        *fake_grid(plan),
    )


def fake_grid(plan) -> tuple:
    """The counter of tiles, if ``plan`` has one, and the greatest number of CTAs."""
    counter = cute.runtime.make_fake_compact_tensor(Int32, (2,), assumed_align=8)
    return (counter if plan.schedule.counted else None, Int32(1))


def fake_lengths(plan) -> tuple:
    """The four vectors of lengths that ``plan`` comes with."""
    return (
        fake_integers(plan.cu_seqlens_q),
        fake_integers(plan.cu_seqlens_k),
        fake_integers(plan.seqused_q),
        fake_integers(plan.seqused_k),
    )
