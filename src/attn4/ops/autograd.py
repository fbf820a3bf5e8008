"""The reference path under torch.autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn4.ops.call import Call
from attn4.ops.check import records_gradient
from attn4.reference import Lengths, backward, forward
from attn4.reference.backward import Saved


def attend_reference(call: Call) -> tuple[Tensor, Tensor]:
    """Out in the dtype of Q, and LSE in float32; both differentiable with respect to q, k and v."""
    if records_gradient(call.q, call.k, call.v):
        return _Attention.apply(call.q, call.k, call.v, call)  # type: ignore[no-any-return, no-untyped-call]
    out, lse = _forward(call)
    return out, lse.float()


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    return forward(
        call.q, call.k, call.v, softmax_scale=call.softmax_scale, mask=call.mask, lengths=call.lengths
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = _forward(call)
        lengths = call.lengths
        # The length tensors too: overwriting one before backward is then an error of torch, not a wrong sum.
        ctx.save_for_backward(
            q,
            k,
            v,
            out,
            lse,
            lengths.cu_seqlens_q,
            lengths.cu_seqlens_k,
            lengths.seqused_q,
            lengths.seqused_k,
        )
        ctx.softmax_scale, ctx.mask = call.softmax_scale, call.mask
        ctx.set_materialize_grads(False)
        return out, lse.float()

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = ctx.saved_tensors
        lengths = Lengths(
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k
        )
        saved = Saved(
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            lengths=lengths,
            softmax_scale=ctx.softmax_scale,
            mask=ctx.mask,
        )
        gradients = _Gradient.apply(q, k, v, grad_out, grad_lse, saved)  # type: ignore[no-untyped-call]
        return (*gradients, None)


class _Gradient(torch.autograd.Function):
    """The backward pass as a node of its own, so that a derivative of it is an error and not 0."""

    @staticmethod
    def forward(_ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V come first only so that autograd knows what the gradients depend on."""
        grad_out, grad_lse, saved = inputs[3:]
        return backward(saved, grad_out, grad_lse)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        raise NotImplementedError(
            "second derivatives of attention are not built; detach the gradients, or write the attention in "
            "torch operations"
        )
