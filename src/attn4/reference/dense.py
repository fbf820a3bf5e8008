"""The oracle: attention as its formula, with the whole score matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from attn4.mask import Mask
from attn4.reference.masking import Band
from attn4.reference.sequences import Lengths, over_sequences


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    mask: Mask | None = None,
    lengths: Lengths | None = None,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T + mask) V and the natural log of the softmax's denominator.

    ``q`` (batch, seqlen_q, heads, dim), ``k`` (batch, seqlen_k, kv_heads, dim), ``v`` (..., dim_v), or packed
    (total, heads, dim) where ``lengths`` has ``cu_seqlens``. Everything is computed and returned in
    ``precision``, by default float32 (float64 for float64 inputs). Memory grows with seqlen_q * seqlen_k.
    Differentiable by torch. Returns out like Q with ``dim_v``, and LSE (batch, heads, seqlen_q) or
    (heads, total_q). A row without a key gets out 0 and LSE -inf.
    """
    precision = precision or accumulation_dtype(q.dtype)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    mask = mask or Mask()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _attend(q.to(precision), k.to(precision), v.to(precision), scale, mask)

    return over_sequences(attend, q, k, v, lengths=lengths or Lengths(), precision=precision)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    keys = k.repeat_interleave(group, dim=2).permute(0, 2, 3, 1)
    values = v.repeat_interleave(group, dim=2).transpose(1, 2)
    scores = q.transpose(1, 2) @ keys * scale
    rows, columns = range(q.shape[1]), range(k.shape[1])
    seen = Band(mask, len(rows), len(columns)).visible(rows, columns, q.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    row_max = scores.detach().amax(dim=-1, keepdim=True)
    empty = row_max == -torch.inf
    row_max = row_max.masked_fill(empty, 0)
    weights = (scores - row_max).exp()
    row_sum = weights.sum(dim=-1, keepdim=True).masked_fill(empty, 1)
    out = weights / row_sum @ values
    lse = (row_max + row_sum.log()).masked_fill(empty, -torch.inf)
    return out.transpose(1, 2), lse.squeeze(-1)
