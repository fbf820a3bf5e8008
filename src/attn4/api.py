"""The functions that users call, with the names and keywords of the flash-attn packages.

What holds for both:

- Any strides are legal as long as the last one is 1, 0 included (``expand``). On GPUs, inputs that do not
  start at, or step by, a multiple of 16 bytes are copied first.
- ``heads`` is a multiple of ``kv_heads``: consecutive query heads share a K/V head (GQA, MQA).
- CUDA tensors run as kernels (bfloat16, float16). CPU tensors run the reference in torch, blockwise
  (bfloat16, float16, float32, float64). Both are differentiable once, with respect to q, k and v, by out and
  by the LSE; where a kernel has no backward pass (docs/support.md), a call that would need it is refused.
- Under autocast q, k and v are taken in its dtype. torch.compile, torch.export and dispatch modes see the
  operators ``attn4::forward`` and ``attn4::backward``; meta and fake tensors give shapes. torch.vmap,
  forward-mode derivatives and derivatives of gradients are refused.
- Masks are aligned bottom right: query ``i`` sees the keys ``j`` with
  ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right``, both bounds inclusive; ``None``
  or -1 is no bound on that side. ``causal`` makes ``right`` at most 0. Lengths are those of the sequence.
- The LSE is the natural log of the softmax's denominator, float32, and differentiable.
- A row that sees no key: out 0, LSE -inf, gradients 0. What lies beyond a stated length never reaches a
  result, NaN or not; its own rows of the results are out 0, LSE -inf and its gradients 0.
- Nothing is ignored: a feature or value that is not supported is an error before anything is launched,
  a ValueError (illegal), TypeError (wrong kind of object) or NotImplementedError (legal, not built, or not
  for this GPU) that says what to do.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from attn4.ops.call import NO_VECTORS
from attn4.ops.check import refuse
from attn4.ops.dispatch import attend
from attn4.ops.emulated import architecture
from attn4.ops.schedule import SchedulerMetadata, parts
from attn4.ops.sort_batches import Request, make
from attn4.plan.explain import explain

__all__ = ["explain", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]


class Unbuilt(TypedDict, total=False):
    """Keywords of the flash-attn packages whose features are not built.

    Their neutral values are accepted, anything else is a NotImplementedError.
    """

    dropout_p: float
    learnable_sink: Tensor | None
    alibi_slopes: Tensor | None
    num_splits: int
    page_table: Tensor | None
    block_table: Tensor | None
    score_mod: Any
    mask_mod: Any


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dropout_p": (0.0,),
    "learnable_sink": (None,),
    "alibi_slopes": (None,),
    "num_splits": (1, 0),
    "page_table": (None,),
    "block_table": (None,),
    "score_mod": (None,),
    "mask_mod": (None,),
}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
    arch: str | None = None,
    **unbuilt: Unpack[Unbuilt],
) -> Any:
    """Exact attention, softmax(softmax_scale * Q K^T + mask) V, of sequences of one length.

    Parameters
    ----------
    q
        (batch, seqlen_q, heads, head_dim).
    k
        (batch, seqlen_k, kv_heads, head_dim), dtype and device of ``q``.
    v
        (batch, seqlen_k, kv_heads, head_dim_v), likewise.
    softmax_scale
        factor of the scores, finite and > 0; None is head_dim ** -0.5.
    causal
        hide the keys past the diagonal, which ends at the last query and the last key.
    window_size
        (left, right), inclusive distances from the diagonal; None or -1 is no limit.
    softcap
        only 0.0, no cap.
    deterministic
        equal inputs give equal bits, in the backward pass too. The forward pass always does.
    return_lse
        return the LSE as well.
    out
        a contiguous tensor to write the result into, aligned to 16 bytes, apart from the inputs; not
        while gradients are recorded.
    backend
        "gpu", "reference" (torch operations, on any device), "emulator" (the compiled kernel, interpreted, on
        CPU tensors: for those who write kernels), or None: by the device of the tensors.
    arch
        what the emulator runs, "sm_90a" or "sm_100a"; None is that of the ``attn4.emulator.device`` block
        that the call is in, outside of one "sm_90a". Only with that backend.
    unbuilt
        see ``Unbuilt``.

    Returns
    -------
    out or (out, lse)
        out (batch, seqlen_q, heads, head_dim_v) in the dtype of ``q``, contiguous; with ``return_lse`` a pair
        of it and lse (batch, heads, seqlen_q), float32.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        See the conventions of this module.
    """
    if unbuilt:
        refuse(dict(unbuilt), _NEUTRAL, "flash_attn_func")
    options = (
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_lse,
        backend,
        architecture(backend, arch) if backend == "emulator" else arch,
    )
    return attend(q, k, v, NO_VECTORS, options, out)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: SchedulerMetadata | None = None,
    backend: str | None = None,
    arch: str | None = None,
    **unbuilt: Unpack[Unbuilt],
) -> Any:
    """Exact attention of sequences whose lengths differ: packed into one axis, or padded.

    Q, and independently K with V, are packed if ``cu_seqlens_*`` is given, else padded to one length.

    Parameters
    ----------
    q
        (total_q, heads, head_dim) with ``cu_seqlens_q``, else (batch, seqlen_q, heads, head_dim).
    k
        (total_k, kv_heads, head_dim) with ``cu_seqlens_k``, else (batch, seqlen_k, kv_heads, head_dim).
    v
        like ``k``, with head_dim_v.
    cu_seqlens_q
        int32 (batch + 1,) on the device of ``q``: 0, then the running sum of the query lengths.
        Rows past its last entry belong to no sequence.
    cu_seqlens_k
        the same for keys.
    max_seqlen_q
        the longest query sequence if known, an int; a hint for the choice of a kernel. The
        result depends on the tensors alone.
    max_seqlen_k
        the same for keys.
    seqused_q
        int32 (batch,): only so many first rows of each query sequence take part.
    seqused_k
        the same for keys. Masks are aligned to the used lengths.
    scheduler_metadata
        what ``get_scheduler_metadata`` returned for these lengths: the sequences with the longest tiles are
        then worked on first. The result is the same, bit for bit, with it or without.
    softmax_scale, causal, window_size, softcap, deterministic, return_lse, out, backend, arch, unbuilt
        as for
        ``flash_attn_func``.

    Returns
    -------
    out or (out, lse)
        out, like ``q`` with head_dim_v; with ``return_lse`` a pair of it and lse, float32, (heads, total_q)
        for packed and (batch, heads, seqlen_q) for padded queries.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        See the conventions of this module. The values of
        length tensors are checked on the CPU only; reading them from a GPU would stall it.
    """
    if unbuilt:
        refuse(dict(unbuilt), _NEUTRAL, "flash_attn_varlen_func")
    order, made_for = parts(scheduler_metadata)
    options = (
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_lse,
        backend,
        architecture(backend, arch) if backend == "emulator" else arch,
        max_seqlen_q,
        max_seqlen_k,
        made_for,
    )
    return attend(q, k, v, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, order), options, out)


def get_scheduler_metadata(
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    headdim_v: int | None = None,
    qkv_dtype: torch.dtype = torch.bfloat16,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    backend: str | None = None,
    arch: str | None = None,
) -> SchedulerMetadata:
    """Sort the sequences of a batch by work, once, for all calls of ``flash_attn_varlen_func`` with them.

    A batch of unequal sequences ends with few multiprocessors at work if its longest sequence comes late. A
    kernel sorts the sequences by the key blocks that their longest tile visits, on the device, without
    waiting for it: one more launch of a few microseconds, which a forward pass of many layers shares.

    Parameters
    ----------
    max_seqlen_q
        as in the calls, which must pass it too: it decides how large a tile is. For padded queries their
        length.
    max_seqlen_k
        the same for keys.
    num_heads_q, num_heads_kv
        of the calls, as all below.
    headdim, headdim_v
        of Q and K, and of V if it differs.
    qkv_dtype
        of the tensors.
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, causal, window_size, backend, arch
        as for ``flash_attn_varlen_func``; at least one tensor of lengths.

    Returns
    -------
    SchedulerMetadata
        On the device of the lengths, to be passed as ``scheduler_metadata``. Batches of more than 8192
        sequences stay in their order, as do those of the reference, which has no schedule.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        See the conventions of this module. A call whose batch, mask, kinds of lengths, device or tile is
        another than the metadata was made for raises a ValueError; the lengths themselves are not compared.
    """
    request = Request(
        heads=num_heads_q,
        kv_heads=num_heads_kv,
        head_dim=headdim,
        head_dim_v=headdim_v,
        dtype=qkv_dtype,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window_size=window_size,
    )
    vectors = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    return make(vectors, request, backend, architecture(backend, arch))
