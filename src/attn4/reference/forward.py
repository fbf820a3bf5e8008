"""Forward attention on any device that torch has, in memory that grows with the sequence, not its square."""

from __future__ import annotations

from torch import Tensor

from attn4.mask import Mask
from attn4.plan.plan import SoftmaxPlan
from attn4.reference.dense import accumulation_dtype
from attn4.reference.online import Tiling, online
from attn4.reference.sequences import Lengths, over_sequences

BLOCKWISE = Tiling(tile_m=256, tile_n=512, softmax=SoftmaxPlan(rescale_threshold=0.0))


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: Mask, lengths: Lengths
) -> tuple[Tensor, Tensor]:
    """Out in the dtype of ``q`` and LSE in float32 (float64 for float64 inputs), by the tiled algorithm.

    ``q`` (batch, seqlen_q, heads, dim) or packed (total_q, heads, dim) with ``lengths.cu_seqlens_q``, ``k``
    and ``v`` likewise. Returns out like Q with the head dim of V, and LSE (batch, heads, seqlen_q) or
    (heads, total_q). Not differentiable by torch: ``attn4.reference.backward`` is its gradient.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        result = online(q, k, v, softmax_scale=softmax_scale, mask=mask, tiling=BLOCKWISE)
        return result.out, result.lse

    precision = accumulation_dtype(q.dtype)
    out, lse = over_sequences(attend, q, k, v, lengths=lengths, precision=precision)
    return out.to(q.dtype), lse
