"""What is asked: one attention call, described without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attn4.mask import Mask

DType = Literal["bfloat16", "float16", "float32", "float64"]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Shapes, dtype, mask and features of one attention call.

    ``seqlen_q`` and ``seqlen_k`` are per sequence; with ``cu_seqlens_*`` they are the longest one.
    ``heads`` counts query heads and is a multiple of ``kv_heads``. ``head_dim`` is that of Q and K,
    ``head_dim_v`` that of V and the output.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: DType = "bfloat16"
    mask: Mask = field(default_factory=Mask)
    cu_seqlens_q: bool = False
    cu_seqlens_k: bool = False
    seqused_q: bool = False
    seqused_k: bool = False
    lse: bool = True
    direction: Direction = "forward"
    deterministic: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.kv_heads

    @property
    def ragged(self) -> bool:
        """Whether sequences may differ in length, as only the device knows."""
        return self.cu_seqlens_q or self.cu_seqlens_k or self.seqused_q or self.seqused_k

    def may_have_empty_rows(self, same_lengths: bool) -> bool:
        """Whether a query of a sequence with keys may see none of them. ``same_lengths``: the lengths that
        tensors hold are known to be those of queries and keys alike.
        """
        left, right = self.mask.left, self.mask.right
        if left is not None and (left < 0 or (right is not None and left + right < 0)):
            return True
        if right is None:
            return False
        if self.ragged and not same_lengths:
            return True
        return right < 0 if self.ragged else self.seqlen_q > self.seqlen_k + right
