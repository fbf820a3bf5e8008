"""The tensors of a case, and how many sets of them keep a cache from flattering a backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn4.bench.cases import Case, tensor_bytes

MOST_SETS = 64
"""More input sets than this cost more time to make than they tell."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Q, K and V of one call: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) when packed.

    ``cu_seqlens`` is int32 (batch + 1) on the same device, or None. ``grad_out`` is the gradient of the
    output, or None where only a forward pass is timed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None
    grad_out: Tensor | None = None


def make_inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    """Standard normal data: constant inputs draw less power, and so run at a higher clock than real ones."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    lead = (case.tokens,) if case.packed else (case.batch, case.seqlen)

    def normal(heads: int, head_dim: int) -> Tensor:
        shape = (*lead, heads, head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    cu_seqlens = None
    if case.packed:
        lengths = torch.tensor((0, *case.seqlens), dtype=torch.int32)
        cu_seqlens = lengths.cumsum(0, dtype=torch.int32).to(device)
    q, k = normal(case.heads, case.head_dim), normal(case.kv_heads, case.head_dim)
    v = normal(case.kv_heads, case.dim_v)
    forward = case.direction == "forward"
    return Inputs(q, k, v, cu_seqlens, None if forward else normal(case.heads, case.dim_v))


def input_sets(case: Case, l2_bytes: int) -> int:
    """Sets to rotate through: between two uses of one, the others must have filled the L2 cache twice."""
    return min(MOST_SETS, 1 + max(1, math.ceil(2 * l2_bytes / tensor_bytes(case))))
