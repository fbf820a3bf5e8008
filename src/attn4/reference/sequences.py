"""Sequences of different lengths in one tensor: packed by ``cu_seqlens``, or cut by ``seqused``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence inside batched tensors (batch, rows, heads, dim)."""

    batch_q: slice
    rows_q: slice
    batch_k: slice
    rows_k: slice

    def of_q(self, x: Tensor) -> Tensor:
        """The view of a tensor laid out like Q."""
        return x[self.batch_q, self.rows_q]

    def of_k(self, x: Tensor) -> Tensor:
        """The view of a tensor laid out like K."""
        return x[self.batch_k, self.rows_k]

    def of_lse(self, x: Tensor) -> Tensor:
        """The view of a tensor (batch, heads, rows)."""
        return x[self.batch_q, :, self.rows_q]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Where sequences lie: int32 tensors, or None.

    ``cu_seqlens_*`` (batch + 1): Q, or K and V, are packed (total, heads, dim) and sequence ``i`` has the
    rows from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``. ``seqused_*`` (batch): only so many rows of each
    sequence take part.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None

    @property
    def given(self) -> bool:
        """Whether sequences differ at all."""
        return any(
            x is not None for x in (self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k)
        )

    def batched_q(self, x: Tensor) -> Tensor:
        """A view of a tensor laid out like Q (or of an LSE) with a batch axis."""
        return x if self.cu_seqlens_q is None else x.unsqueeze(0)

    def batched_k(self, x: Tensor) -> Tensor:
        """A view of a tensor laid out like K with a batch axis."""
        return x if self.cu_seqlens_k is None else x.unsqueeze(0)

    def parts(self, q: Tensor, k: Tensor) -> list[Part]:
        """The sequences that have a query and a key; one part over the whole batch if all are alike."""
        if not self.given:
            everything = slice(None)
            whole = Part(everything, everything, everything, everything)
            return [whole] if q.shape[0] and q.shape[1] and k.shape[1] else []
        queries = _places(q, self.cu_seqlens_q, self.seqused_q)
        keys = _places(k, self.cu_seqlens_k, self.seqused_k)
        return [
            Part(batch_q, rows_q, batch_k, rows_k)
            for (batch_q, rows_q), (batch_k, rows_k) in zip(queries, keys, strict=True)
            if rows_q.start < rows_q.stop and rows_k.start < rows_k.stop
        ]


def _places(x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> list[tuple[slice, slice]]:
    used = None if seqused is None else seqused.tolist()
    if cu_seqlens is None:
        batch, rows = x.shape[0], x.shape[1]
        stops = [rows] * batch if used is None else used
        return [(slice(i, i + 1), slice(0, stop)) for i, stop in enumerate(stops)]
    bounds = cu_seqlens.tolist()
    starts = bounds[:-1]
    stops = bounds[1:] if used is None else [start + n for start, n in zip(starts, used, strict=True)]
    return [(slice(0, 1), slice(start, stop)) for start, stop in zip(starts, stops, strict=True)]


def over_sequences(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, *, lengths: Lengths, precision: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``attend`` applied to each sequence by itself; rows outside every sequence get out 0 and LSE -inf.

    ``attend`` takes (batch, rows, heads, dim) views and returns out and LSE (batch, heads, rows). Returns out
    laid out like Q with the head dim of V, and LSE (batch, heads, rows) or (heads, total), in ``precision``.
    """
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=precision)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    lse = q.new_full(lse_shape, -torch.inf, dtype=precision)
    batched_q, batched_k, batched_v = lengths.batched_q(q), lengths.batched_k(k), lengths.batched_k(v)
    batched_out, batched_lse = lengths.batched_q(out), lengths.batched_q(lse)
    for part in lengths.parts(batched_q, batched_k):
        part_out, part_lse = attend(part.of_q(batched_q), part.of_k(batched_k), part.of_k(batched_v))
        part.of_q(batched_out).copy_(part_out)
        part.of_lse(batched_lse).copy_(part_lse)
    return out, lse
