"""Tensors for a case: the values that have found bugs, in the memory layouts that have found bugs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Q, K, V and the length tensors by keyword; ``None`` ones left out."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: dict[str, Tensor]

    def with_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
        return Inputs(q=q, k=k, v=v, lengths=self.lengths)


def _gaussian(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    return q, k, v


def _negative(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Every logit near -200: a running maximum stuck at 0 underflows the whole row."""
    q[..., 0] = 1
    k[..., 0] = -200 * math.sqrt(q.shape[-1])
    return q, k, v


def _very_negative(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Every logit near -300."""
    q[..., 0] = 1
    k[..., 0] = -300 * math.sqrt(q.shape[-1])
    return q, k, v


def _uniform(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Equal weights, so the output is the mean of V: a key too many or too few shows."""
    return q.zero_(), k, v


def _huge(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Raw logits to -2.4e5, past any finite stand-in for minus infinity."""
    q[..., 0] = 448
    k[..., 0] = -540 + 4 * k[..., 0].round()
    return q, k, v


def _outliers(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """One channel of outliers, +-448 against +-1880 in every sixteenth key: raw logits of +-8.4e5."""
    q[..., 0] = 448
    q[..., 1::2, :, 0] = -448
    k[..., 0] = 0
    k[..., 5::32, :, 0] = 1880
    k[..., 21::32, :, 0] = -1880
    return q, k, v


def _spike(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """One key, in the middle, a hundred times as large as the others: half of the queries see little else."""
    middle = k.shape[-3] // 2
    k[..., middle, :, :] *= 100
    v[..., middle, :, :] *= 100
    return q, k, v


def _ascending(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """The logit grows with each key: by 37 in log2 units over 64 keys, so that every tile rescales where
    tiles are visited from the first key to the last.
    """
    return _slope(q, k, 0.1), k, v


def _descending(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """The same where tiles are visited from the last key to the first, as the kernels do."""
    return _slope(q, k, -0.1), k, v


def _slope(q: Tensor, k: Tensor, slope: float) -> Tensor:
    steps = torch.arange(k.shape[-3], device=k.device, dtype=k.dtype)
    q[..., 0] = 4
    k[..., 0] = (steps * (slope * math.sqrt(q.shape[-1])))[:, None]
    return q


def _constant(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Scores of 1e12: with a single key, the output is V all the same."""
    return q.fill_(133120), k.fill_(133120), v.fill_(133120)


VALUES: dict[str, Callable[[Tensor, Tensor, Tensor], Triple]] = {
    "gaussian": _gaussian,
    "negative": _negative,
    "very negative": _very_negative,
    "uniform": _uniform,
    "huge": _huge,
    "outliers": _outliers,
    "spike": _spike,
    "ascending": _ascending,
    "descending": _descending,
    "constant": _constant,
}


def _transposed(x: Tensor, first: int, second: int) -> Tensor:
    return x.transpose(first, second).contiguous().transpose(first, second)


def _offset(x: Tensor) -> Tensor:
    """Contiguous, but one element past an aligned address."""
    storage = x.new_empty(x.numel() + 1)
    return storage[1:].view(x.shape).copy_(x)


def _odd_rows(x: Tensor) -> Tensor:
    """Rows of head_dim + 1 elements, of which the last is not part of the tensor (and NaN)."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 1), torch.nan)
    return wide[..., :-1].copy_(x)


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Slices of one projection's output (rows, heads + 2 * kv_heads, head_dim)."""
    whole = torch.cat([q, k, v], dim=-2)
    return tuple(whole.split([q.shape[-2], k.shape[-2], v.shape[-2]], dim=-2))


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Triple]:
    return lambda q, k, v: (change(q), change(k), change(v))


LAYOUTS: dict[str, Callable[[Tensor, Tensor, Tensor], Triple]] = {
    "contiguous": _each(lambda x: x),
    "bhsd": _each(lambda x: _transposed(x, -3, -2)),
    "sbhd": _each(lambda x: _transposed(x, 0, 1)),
    "offset": _each(_offset),
    "odd_rows": _each(_odd_rows),
    "fused": _fused,
    "heads_expanded": lambda q, k, v: (q, k[..., :1, :].expand_as(k), v[..., :1, :].expand_as(v)),
    "batch_expanded": lambda q, k, v: (q, k[:1].expand_as(k), v[:1].expand_as(v)),
}


def make_inputs(case: Any, device: str | torch.device, seed: int = 0) -> Inputs:
    """The tensors of a ``cases.Case``; whatever lies beyond a stated length is NaN."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        # 16 bits at once: tensors of more than 2**31 elements must not pass through float32.
        return torch.randn(shape, generator=generator, device=device, dtype=case.torch_dtype)

    q, k, v = VALUES[case.values](normal(case.q_shape), normal(case.k_shape), normal(case.v_shape))
    lengths = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in case.lengths().items()}
    _poison(q, case.lens_q, case.used_q)
    for x in (k, v):
        _poison(x, case.lens_k, case.used_k)
    q, k, v = LAYOUTS[case.layout](q, k, v)
    return Inputs(q=q, k=k, v=v, lengths=lengths)


def _poison(x: Tensor, lens: tuple[int, ...] | None, used: tuple[int, ...] | None) -> None:
    if lens is None:
        for sequence, count in enumerate(used or ()):
            x[sequence, count:] = torch.nan
        return
    start = 0
    for sequence, length in enumerate(lens):
        if used is not None:
            x[start + used[sequence] : start + length] = torch.nan
        start += length
    x[start:] = torch.nan
