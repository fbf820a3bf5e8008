"""Is a result right? Compared with float64 on slices, before any time is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn4.bench.cases import Case
from attn4.bench.inputs import Inputs
from attn4.bench.rows import Accuracy
from attn4.mask import Mask

ROWS = 128
"""Query rows compared in one head of one sequence."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """Query rows of one head of one sequence, and what they should hold."""

    sequence: int
    head: int
    rows: Tensor
    expected: Tensor
    allowed: float


class Oracle:
    """What the output of one set of inputs must be, on slices.

    The slices are ``ROWS`` rows from the first to the last, of the first, the middle and the last head (the
    middle one tells kv heads shared in blocks from kv heads taken in turns), of the first, the last, the
    longest and the shortest sequence. Allowed is twice the error of the same arithmetic in
    the dtype of the inputs, plus one rounding of the largest value.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case = case
        self._shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
        self._slices = [_slice(case, inputs, sequence, head) for sequence, head in _places(case)]

    def check(self, out: Tensor) -> Accuracy:
        """The worst slice of ``out``, in the layout of Q; NaN is the error if any element is not finite."""
        if out.shape != self._shape:
            raise ValueError(f"the result has shape {tuple(out.shape)}, and not {self._shape}")
        if not bool(torch.isfinite(out).all()):
            return Accuracy(error=float("nan"), allowed=min(part.allowed for part in self._slices))
        checks = [self._compare(out, part) for part in self._slices]
        return max(checks, key=lambda accuracy: accuracy.error / accuracy.allowed)

    def _compare(self, out: Tensor, part: _Slice) -> Accuracy:
        got = sequence_of(self._case, out, part.sequence)[part.rows, part.head].double()
        return Accuracy(error=float((got - part.expected).abs().max()), allowed=part.allowed)


def _places(case: Case) -> Iterator[tuple[int, int]]:
    lengths = case.seqlens
    sequences = {0, len(lengths) - 1, lengths.index(max(lengths)), lengths.index(min(lengths))}
    for sequence in sorted(sequences):
        for head in sorted({0, case.heads // 2, case.heads - 1}):
            yield sequence, head


def sequence_of(case: Case, tensor: Tensor, sequence: int) -> Tensor:
    """One sequence of a tensor: (seqlen, heads, head_dim)."""
    if not case.packed:
        return tensor[sequence]
    start = sum(case.seqlens[:sequence])
    return tensor[start : start + case.seqlens[sequence]]


def _slice(case: Case, inputs: Inputs, sequence: int, head: int) -> _Slice:
    kv_head = head // (case.heads // case.kv_heads)
    seqlen = case.seqlens[sequence]
    rows = torch.linspace(0, seqlen - 1, min(ROWS, seqlen), dtype=torch.float64).round().long()
    rows = rows.to(inputs.q.device)
    q = sequence_of(case, inputs.q, sequence)[rows, head]
    k = sequence_of(case, inputs.k, sequence)[:, kv_head]
    v = sequence_of(case, inputs.v, sequence)[:, kv_head]
    visible = visible_keys(rows, seqlen, case.mask)
    expected = attention(q.double(), k.double(), v.double(), visible)
    same_dtype = attention(q, k, v, visible).double()
    rounding = torch.finfo(q.dtype).eps / 2 * float(expected.abs().max())
    allowed = 2 * float((same_dtype - expected).abs().max()) + rounding
    return _Slice(sequence, head, rows, expected, allowed)


def visible_keys(rows: Tensor, seqlen: int, mask: Mask) -> Tensor:
    """Boolean (rows, keys): which keys each row sees, for queries and keys of one length."""
    distance = torch.arange(seqlen, device=rows.device)[None, :] - rows[:, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if mask.left is not None:
        visible &= distance >= -mask.left
    if mask.right is not None:
        visible &= distance <= mask.right
    return visible


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention of (rows, head_dim) and (keys, head_dim) in their dtype; no visible key gives 0."""
    scores = (q @ k.T) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    out: Tensor = weights.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0) @ v
    return out
