"""The oracle, the yardstick, and the rule by which a result passes.

A result passes if its error against the float32 (or float64) oracle is at most twice that of torch in the
result's own dtype, plus one unit in the last place of the largest output. Largest and root mean square
error both count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn4.mask import Mask
from attn4.reference import Lengths, dense
from attn4.reference.masking import Band
from attn4.reference.sequences import over_sequences
from case_inputs import Inputs

FACTOR = 2.0
LSE_ATOL = 1e-4
LSE_RTOL = 1e-6
"""Of the largest LSE: a few roundings of float32."""

_MOST_SCORES = 2**27

MaskedAttend = Callable[[Tensor, Tensor, Tensor, Mask], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Answer:
    """``out`` and ``lse`` as float32 or float64."""

    out: Tensor
    lse: Tensor


def oracle(case, inputs: Inputs, precision: torch.dtype = torch.float32) -> Answer:
    """Attention by its formula in ``precision``."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        return dense(q, k, v, softmax_scale=case.softmax_scale, mask=mask, precision=precision)

    return _answer(case, inputs, attend, precision)


def eager(case, inputs: Inputs, scores_dtype: torch.dtype | None = None) -> Answer:
    """What torch makes of it in the dtype of the inputs: two matrix products around a softmax.

    With ``scores_dtype`` scores are of that dtype, weights and output of that of the inputs: what a fused
    kernel can do. Where logits are in the hundreds, scores of 16 bits are no yardstick: they are wrong by
    84 per cent.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        return eager_attention((q, k, v), mask, case.softmax_scale, scores_dtype)

    return _answer(case, inputs, attend, torch.float32)


def eager_attention(
    qkv: tuple[Tensor, Tensor, Tensor], mask: Mask, scale: float, scores_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Out and LSE of (batch, rows, heads, dim) tensors by plain operations of torch, which differentiates
    them.
    """
    q, k, v = qkv
    q, k = q.to(scores_dtype or v.dtype), k.to(scores_dtype or v.dtype)
    group = q.shape[2] // k.shape[2]
    keys = k.repeat_interleave(group, dim=2).permute(0, 2, 3, 1)
    values = v.repeat_interleave(group, dim=2).transpose(1, 2)
    scores = q.transpose(1, 2) @ keys * scale
    rows, columns = range(q.shape[1]), range(k.shape[1])
    seen = Band(mask, len(rows), len(columns)).visible(rows, columns, q.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(dim=-1).masked_fill(~seen.any(dim=-1, keepdim=True), 0)
    return (weights.to(v.dtype) @ values).transpose(1, 2), scores.float().logsumexp(dim=-1)


def _answer(case, inputs: Inputs, attend: MaskedAttend, precision: torch.dtype) -> Answer:
    lengths = Lengths(**inputs.lengths)

    def in_chunks(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _in_chunks(attend, (q, k, v), case.mask, precision)

    return Answer(
        *over_sequences(in_chunks, inputs.q, inputs.k, inputs.v, lengths=lengths, precision=precision)
    )


def _in_chunks(
    attend: MaskedAttend, tensors: tuple[Tensor, Tensor, Tensor], mask: Mask, precision: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``attend`` on so few query rows and heads at a time that the scores fit."""
    q, k, v = tensors
    seqlen_q, group = q.shape[1], q.shape[2] // k.shape[2]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=precision)
    lse = q.new_empty((q.shape[0], q.shape[2], seqlen_q), dtype=precision)
    row = q.shape[0] * group * k.shape[1]
    heads = min(k.shape[2], max(1, _MOST_SCORES // (row * seqlen_q)))
    rows = max(1, min(seqlen_q, _MOST_SCORES // (row * heads)))
    for head in range(0, k.shape[2], heads):
        kv_heads, q_heads = slice(head, head + heads), slice(head * group, (head + heads) * group)
        for start in range(0, seqlen_q, rows):
            stop = min(start + rows, seqlen_q)
            at = slice(start, stop)
            part_out, part_lse = attend(
                q[:, at, q_heads], k[:, :, kv_heads], v[:, :, kv_heads], rows_mask(mask, seqlen_q - stop)
            )
            out[:, at, q_heads] = part_out.to(precision)
            lse[:, q_heads, at] = part_lse.to(precision)
    return out, lse


def rows_mask(mask: Mask, rows_after: int) -> Mask:
    """The mask of the first rows, when the last ``rows_after`` are cut off and the alignment moves up."""
    return Mask(
        None if mask.left is None else mask.left + rows_after,
        None if mask.right is None else mask.right - rows_after,
    )


def judge(out: Tensor, lse: Tensor | None, truth: Answer, yardstick: Answer) -> None:
    """Raise AssertionError unless ``out`` and ``lse`` are as good as the rule at the top asks."""
    empty = truth.lse == -torch.inf
    compare_out(out, empty, truth.out, yardstick.out)
    if lse is not None:
        compare_lse(lse, empty, truth.lse, yardstick.lse)


def compare_out(out: Tensor, empty: Tensor, truth: Tensor, yardstick: Tensor) -> None:
    assert out.shape == truth.shape
    assert out.isfinite().all(), f"{int((~out.isfinite()).sum())} elements of out are not finite"
    assert out.movedim(-2, -3)[empty].count_nonzero() == 0, "rows without a key must be exactly 0"
    if out.numel() == 0:
        return
    limit = torch.finfo(out.dtype).eps * truth.abs().max().item()
    error, allowed = (out - truth).abs(), (yardstick - truth).abs()
    for name, measure in (("largest", torch.amax), ("root mean square", _rms)):
        found, bound = measure(error).item(), FACTOR * measure(allowed).item() + limit
        assert found <= bound, f"{name} error of out is {found:.3e}, allowed is {bound:.3e}"


def compare_lse(lse: Tensor, empty: Tensor, truth: Tensor, yardstick: Tensor) -> None:
    assert lse.dtype == torch.float32
    assert lse.shape == truth.shape
    assert torch.equal(lse == -torch.inf, empty), "LSE must be -inf exactly where no key is seen"
    seen = ~empty
    if not bool(seen.any()):
        return
    limit = LSE_ATOL + LSE_RTOL * truth[seen].abs().max().item()
    error, allowed = (lse - truth)[seen].abs(), (yardstick - truth)[seen].abs()
    found, bound = error.max().item(), FACTOR * allowed.max().item() + limit
    assert found <= bound, f"largest error of lse is {found:.3e}, allowed is {bound:.3e}"


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def same(found, expected) -> bool:
    """Whether tensors are equal to others, bit for bit, one after the other."""
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
