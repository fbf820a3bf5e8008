"""The gradient of attention, blockwise: scores are computed again, tile by tile, from Q, K and the LSE."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn4.mask import Mask
from attn4.reference.dense import accumulation_dtype
from attn4.reference.forward import BLOCKWISE
from attn4.reference.masking import Band, tiles
from attn4.reference.online import fold_keys, fold_queries, grouped_matmul
from attn4.reference.sequences import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What the forward pass leaves for the backward pass; tensors in the caller's layout.

    ``q``, ``k``, ``v`` are the inputs, ``out`` and ``lse`` the results; ``lse`` in float32, or float64 for
    float64 inputs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    lengths: Lengths
    softmax_scale: float
    mask: Mask


def backward(saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, K and V, in their dtypes and layouts, from those of out and of the LSE.

    With P = exp(scores - lse): dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dQ = scale dS K and
    dK = scale dS^T Q, where delta = rowsum(dO * O) - dLSE: the LSE's own gradient adds P to dS.
    Sums run in float32, float64 for float64 inputs. Rows without a key, and rows outside every sequence,
    give and get exactly 0, whatever their incoming gradient holds.
    """
    precision = accumulation_dtype(saved.q.dtype)
    lengths = saved.lengths
    q, out, lse = (lengths.batched_q(x) for x in (saved.q, saved.out, saved.lse))
    k, v = lengths.batched_k(saved.k), lengths.batched_k(saved.v)
    grad_out = torch.zeros_like(out) if grad_out is None else lengths.batched_q(grad_out)
    grad_lse = torch.zeros_like(lse) if grad_lse is None else lengths.batched_q(grad_lse)
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape, dtype=precision) for x in (q, k, v))
    for part in lengths.parts(q, k):
        sequence = _Sequence.of(
            queries=part.of_q(q).to(precision),
            keys=part.of_k(k).to(precision),
            values=part.of_k(v).to(precision),
            out=part.of_q(out).to(precision),
            lse=part.of_lse(lse).to(precision),
            grad_out=part.of_q(grad_out).to(precision),
            grad_lse=part.of_lse(grad_lse).to(precision),
        )
        part_q, part_k, part_v = sequence.gradients(saved.mask, saved.softmax_scale)
        part.of_q(grad_q).copy_(part_q.permute(0, 3, 1, 2, 4).flatten(2, 3))
        part.of_k(grad_k).copy_(part_k.transpose(1, 2))
        part.of_k(grad_v).copy_(part_v.transpose(1, 2))
    return (
        grad_q.view(saved.q.shape).to(saved.q.dtype),
        grad_k.view(saved.k.shape).to(saved.k.dtype),
        grad_v.view(saved.v.shape).to(saved.v.dtype),
    )


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Sequences of one length: (batch, kv_heads, group, rows, ...) and (batch, kv_heads, rows, dim)."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    grad_out: Tensor
    lse: Tensor
    delta: Tensor

    @classmethod
    def of(
        cls,
        *,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor,
    ) -> _Sequence:
        kv_heads = keys.shape[2]
        empty = lse == -torch.inf
        # An empty row's incoming gradient may be anything, -inf and NaN too; 0 * NaN would reach dV.
        grad_out = grad_out.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0)
        delta = (grad_out * out).sum(dim=-1).transpose(1, 2) - grad_lse
        delta = delta.masked_fill(empty, 0)
        # exp(scores - inf) = 0 gives an empty row no weight.
        lse = lse.masked_fill(empty, torch.inf)
        return cls(
            fold_queries(queries, kv_heads),
            fold_keys(keys),
            fold_keys(values),
            fold_queries(grad_out, kv_heads),
            _fold_column(lse, kv_heads),
            _fold_column(delta, kv_heads),
        )

    def gradients(self, mask: Mask, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        band = Band(mask, self.queries.shape[3], self.keys.shape[2])
        grad_q = torch.zeros_like(self.queries)
        grad_k, grad_v = torch.zeros_like(self.keys), torch.zeros_like(self.values)
        for rows in tiles(range(band.seqlen_q), BLOCKWISE.tile_m):
            at_rows = slice(rows.start, rows.stop)
            queries, grad_out = self.queries[:, :, :, at_rows], self.grad_out[:, :, :, at_rows]
            lse, delta = self.lse[:, :, :, at_rows], self.delta[:, :, :, at_rows]
            for columns in tiles(band.keys(rows), BLOCKWISE.tile_n):
                at_keys = slice(columns.start, columns.stop)
                keys, values = self.keys[:, :, at_keys], self.values[:, :, at_keys]
                scores = grouped_matmul(queries, keys.transpose(-1, -2)).mul_(scale)
                if band.hides(rows, columns):
                    scores.masked_fill_(~band.visible(rows, columns, scores.device), -torch.inf)
                weights = scores.sub_(lse).exp_()
                grad_v[:, :, at_keys] += _summed_outer(weights, grad_out)
                grad_weights = grouped_matmul(grad_out, values.transpose(-1, -2))
                grad_scores = grad_weights.sub_(delta).mul_(weights).mul_(scale)
                grad_q[:, :, :, at_rows] += grouped_matmul(grad_scores, keys)
                grad_k[:, :, at_keys] += _summed_outer(grad_scores, queries)
        return grad_q, grad_k, grad_v


def _fold_column(x: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, rows) as (batch, kv_heads, group, rows, 1)."""
    batch, heads, rows = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads, rows, 1)


def _summed_outer(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of (batch, kv_heads, group, rows, ...), summed over the group."""
    return left.flatten(2, 3).transpose(-1, -2) @ right.flatten(2, 3)
