"""From a plan to a compiled kernel, with fake tensors: no GPU, no shape of any call."""

from __future__ import annotations

import tempfile

import cutlass.cute as cute
from cutlass import Float32, Int32

from attn4.kernels.shared.call import DTYPES
from attn4.kernels.shared.sort_batches import SortBatches
from attn4.kernels.sm90.forward.kernel import Forward as HopperForward
from attn4.kernels.sm100.forward.kernel import Forward as BlackwellForward

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


def compile_plan(plan):
    """Compile the kernel of ``plan``.

    Returns the DSL's compiled function, to be called or exported through tvm-ffi with the arguments
    (q, k, v, out, lse, softmax_scale, window_left, window_right, cu_seqlens_q, cu_seqlens_k, seqused_q,
    seqused_k, batch_order, counter, ctas), launching on the stream of the tensors' framework. The kernel that
    sorts batches takes (batch_order, rows_q, rows_k, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
    seqused_q, seqused_k): rows are those of a padded sequence, and it writes batch + 1 entries.
    """
    if plan.kernel == "sort_batches":
        return compiled(SortBatches(plan), plan, fake_integers(True), *[Int32(0)] * 4, *fake_lengths(plan))
    if plan.direction != "forward":
        raise NotImplementedError(f"no {plan.direction} kernel is built yet; the forward pass is")
    if plan.cta_group != 1:
        raise NotImplementedError("no kernel for groups of CTAs is built yet; choose a plan with cta_group=1")
    dtype = DTYPES[plan.dtype]
    lse = None
    if plan.lse:
        rank = 2 if plan.cu_seqlens_q else 3
        lse = cute.runtime.make_fake_compact_tensor(
            Float32,
            tuple(cute.sym_int() for _ in range(rank)),
            stride_order=tuple(reversed(range(rank))),
            assumed_align=4,
        )
    counter = None
    if plan.schedule.dynamic:
        counter = cute.runtime.make_fake_compact_tensor(Int32, (2,), assumed_align=8)
    return compiled(
        FORWARD[plan.arch](plan),
        plan,
        fake_rows(dtype, plan.cu_seqlens_q),
        fake_rows(dtype, plan.cu_seqlens_k),
        fake_rows(dtype, plan.cu_seqlens_k),
        fake_rows(dtype, plan.cu_seqlens_q),
        lse,
        Float32(1.0),
        Int32(0),
        Int32(0),
        *fake_lengths(plan),
        fake_integers(plan.schedule.sorted_batches),
        counter,
        Int32(1),
    )


def fake_lengths(plan):
    """The vectors of lengths that the plan has."""
    present = (plan.cu_seqlens_q, plan.cu_seqlens_k, plan.seqused_q, plan.seqused_k)
    return tuple(map(fake_integers, present))


def compiled(kernel, plan, *arguments):
    """``kernel``, compiled for these arguments and a stream."""
    with tempfile.TemporaryDirectory() as dump:
        return cute.compile(
            kernel,
            *arguments,
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {plan.arch} --keep-ptx --dump-dir {dump}",
        )
