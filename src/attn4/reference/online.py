"""The tiled algorithm of the kernels in torch: online softmax, with its two savings, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn4.mask import Mask
from attn4.plan.plan import SoftmaxPlan
from attn4.reference.dense import accumulation_dtype
from attn4.reference.exp2 import exp2_polynomial
from attn4.reference.masking import Band, tiles

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

LAZY = SoftmaxPlan(rescale_threshold=8.0)
"""The running maximum may lag by a factor of 2^8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How the work is cut, and how its softmax is computed.

    ``tile_m`` queries meet ``tile_n`` keys in one step. ``softmax`` holds the rescale threshold in log2 units
    and the share of polynomial 2^x. ``probabilities``: the dtype that P is rounded to before P V, as the
    tensor core wants it; None does not round. The row sum always adds unrounded values.
    """

    tile_m: int = 128
    tile_n: int = 128
    softmax: SoftmaxPlan = LAZY
    probabilities: torch.dtype | None = None


@dataclass(slots=True)
class Rescales:
    """What happened to the accumulator rows, counted once a row and a step after its first key.

    ``done``: the row maximum moved and the row was multiplied. ``skipped``: the maximum grew, but by no more
    than the threshold, so nothing was multiplied. ``unneeded``: the maximum did not grow.
    """

    done: int = 0
    skipped: int = 0
    unneeded: int = 0


@dataclass(frozen=True, slots=True)
class Online:
    """``out`` (batch, seqlen_q, heads, dim_v), ``lse`` (batch, heads, seqlen_q), and what it took."""

    out: Tensor
    lse: Tensor
    rescales: Rescales


def online(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    mask: Mask | None = None,
    tiling: Tiling | None = None,
) -> Online:
    """Attention tile by tile, never holding more scores than one tile of them.

    ``q`` (batch, seqlen_q, heads, dim), ``k`` (batch, seqlen_k, kv_heads, dim), ``v`` (..., dim_v). Computed
    in float32, float64 for float64 inputs. A row's running maximum may lag behind the true one by the
    threshold; numerator and denominator share it, so the final division is exact all the same.
    """
    tiling = tiling or Tiling()
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    band = Band(mask or Mask(), q.shape[1], k.shape[1])
    precision = accumulation_dtype(q.dtype)
    # Scores in log2 units, so that each exponential is one 2^x.
    queries = fold_queries(q.to(precision) * (scale * LOG2_E), k.shape[2])
    keys, values = fold_keys(k.to(precision)), fold_keys(v.to(precision))
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=precision)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=precision)
    rescales = Rescales()
    for rows in tiles(range(q.shape[1]), tiling.tile_m):
        state = _Rows.start(queries[:, :, :, rows.start : rows.stop], values.shape[-1])
        for columns in tiles(band.keys(rows), tiling.tile_n):
            hidden = ~band.visible(rows, columns, q.device) if band.hides(rows, columns) else None
            span = slice(columns.start, columns.stop)
            state.step(keys[:, :, span], values[:, :, span], hidden, tiling, rescales)
        state.finish(out[:, rows.start : rows.stop], lse[:, :, rows.start : rows.stop])
    return Online(out, lse, rescales)


def fold_queries(x: Tensor, kv_heads: int) -> Tensor:
    """(batch, rows, heads, dim) as (batch, kv_heads, group, rows, dim): queries that share keys together."""
    batch, rows, heads, dim = x.shape
    return x.reshape(batch, rows, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)


def fold_keys(x: Tensor) -> Tensor:
    """(batch, rows, kv_heads, dim) as (batch, kv_heads, rows, dim), contiguous."""
    return x.transpose(1, 2).contiguous()


@dataclass(slots=True)
class _Rows:
    """The running softmax of one tile of queries; all tensors (batch, kv_heads, group, tile_m, ...)."""

    queries: Tensor
    row_max: Tensor
    row_sum: Tensor
    accumulator: Tensor

    @classmethod
    def start(cls, queries: Tensor, dim_v: int) -> _Rows:
        column = (*queries.shape[:-1], 1)
        return cls(
            queries,
            queries.new_full(column, -torch.inf),
            queries.new_zeros(column),
            queries.new_zeros((*queries.shape[:-1], dim_v)),
        )

    def step(
        self, keys: Tensor, values: Tensor, hidden: Tensor | None, tiling: Tiling, rescales: Rescales
    ) -> None:
        scores = grouped_matmul(self.queries, keys.transpose(-1, -2))
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        self._move_maximum(scores.amax(dim=-1, keepdim=True), tiling.softmax.rescale_threshold, rescales)
        # A row that has seen no key yet keeps -inf; 0 in its place makes 2^(-inf - 0) = 0, never NaN.
        reference = self.row_max.masked_fill(self.row_max == -torch.inf, 0)
        weights = _exp2(scores.sub_(reference), tiling.softmax.fma_exp_every)
        self.row_sum += weights.sum(dim=-1, keepdim=True)
        if tiling.probabilities is not None:
            weights = weights.to(tiling.probabilities).to(scores.dtype)
        self.accumulator += grouped_matmul(weights, values)

    def _move_maximum(self, tile_max: Tensor, threshold: float, rescales: Rescales) -> None:
        started = self.row_max > -torch.inf
        grown = tile_max > self.row_max
        moves = grown & ~(tile_max - self.row_max <= threshold)
        moved = torch.where(moves, tile_max, self.row_max)
        rescaled = moves & started
        if bool(rescaled.any()):
            # Rows that do not move multiply by 2^0; a first maximum has nothing to multiply.
            factor = torch.where(rescaled, self.row_max - moved, 0).exp2()
            self.row_sum *= factor
            self.accumulator *= factor
        rescales.done += int(rescaled.sum())
        rescales.skipped += int((started & grown & ~moves).sum())
        rescales.unneeded += int((started & ~grown).sum())
        self.row_max = moved

    def finish(self, out: Tensor, lse: Tensor) -> None:
        """Divide, and write (batch, tile_m, heads, dim_v) and (batch, heads, tile_m)."""
        empty = self.row_sum == 0
        row_sum = self.row_sum.masked_fill(empty, 1)
        result = (self.accumulator / row_sum).permute(0, 3, 1, 2, 4)
        out.copy_(result.flatten(2, 3))
        natural = ((self.row_max + row_sum.log2()) * LN_2).masked_fill(empty, -torch.inf)
        lse.copy_(natural.squeeze(-1).flatten(1, 2))


def grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """(batch, kv_heads, group, m, k) times (batch, kv_heads, k, n): one product for heads that share keys."""
    return (left.flatten(2, 3) @ right).view(*left.shape[:-1], right.shape[-1])


def _exp2(x: Tensor, polynomial_every: int) -> Tensor:
    if polynomial_every == 0:
        return x.exp2_()
    chosen = slice(polynomial_every - 1, None, polynomial_every)
    polynomial = exp2_polynomial(x[..., chosen])
    x.exp2_()
    x[..., chosen] = polynomial
    return x
