"""One attention call: what the user passed, and what it means once checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor

from attn4.mask import Mask
from attn4.ops.schedule import MadeFor
from attn4.problem import DType, Problem
from attn4.reference import Lengths

Backend = Literal["gpu", "emulator", "reference"]

Vectors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""``cu_seqlens_q``, ``cu_seqlens_k``, ``seqused_q``, ``seqused_k``, and the order of the sequences."""

NO_VECTORS: Vectors = (None, None, None, None, None)
"""Known by identity: all sequences have the length of their tensor."""


class Options(NamedTuple):
    """The keyword arguments as the user gave them, unchecked; hashable if they are legal."""

    softmax_scale: Any = None
    causal: Any = False
    window_size: Any = (None, None)
    softcap: Any = 0.0
    deterministic: Any = False
    return_lse: Any = False
    backend: Any = None
    arch: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    schedule: MadeFor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A legal call; ``q`` is (batch, seqlen_q, heads, dim), or (total_q, heads, dim) if ``cu_seqlens_q``.

    ``arch`` is the architecture that the emulator runs; None on the other backends. ``schedule``: what the
    scheduler metadata that comes with the call was made for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Lengths
    softmax_scale: float
    mask: Mask
    deterministic: bool
    return_lse: bool
    backend: Backend
    arch: str | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    schedule: MadeFor | None = None

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return batch_of(self.q, self.lengths.cu_seqlens_q)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """That of Q, with the head dim of V."""
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, heads, seqlen_q) or (heads, total_q)."""
        return (*self.q.shape[:-3], self.q.shape[-2], self.q.shape[-3])

    def problem(self) -> Problem:
        """The call without its tensors. A packed length is ``max_seqlen_*`` if given, else the total."""
        lengths = self.lengths
        longest_q = self.max_seqlen_q if lengths.cu_seqlens_q is not None else None
        longest_k = self.max_seqlen_k if lengths.cu_seqlens_k is not None else None
        return Problem(
            batch=self.batch,
            seqlen_q=self.q.shape[-3] if longest_q is None else longest_q,
            seqlen_k=self.k.shape[-3] if longest_k is None else longest_k,
            heads=self.q.shape[-2],
            kv_heads=self.k.shape[-2],
            head_dim=self.q.shape[-1],
            head_dim_v=self.v.shape[-1],
            dtype=cast(DType, str(self.q.dtype).removeprefix("torch.")),
            mask=self.mask,
            cu_seqlens_q=lengths.cu_seqlens_q is not None,
            cu_seqlens_k=lengths.cu_seqlens_k is not None,
            seqused_q=lengths.seqused_q is not None,
            seqused_k=lengths.seqused_k is not None,
            lse=self.return_lse,
            deterministic=self.deterministic,
        )


def batch_of(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """The number of sequences in a padded or packed tensor."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
