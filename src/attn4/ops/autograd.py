"""The gradient of attention: what is saved for it and how it is taken, by eager calls and operators alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from attn4.ops.call import NO_VECTORS, Vectors
from attn4.ops.operands import Operands
from attn4.ops.prepared import compute, compute_gradient
from attn4.ops.recent import Ready
from attn4.ops.watched import transformed, watched

_TENSORS = Operands._fields.index("softmax_scale")
"""How many of the operands are tensors; they come first."""


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what ``differentiate`` needs: the operands and both results.

    The length tensors too: overwriting one before backward is then an error of torch, not a wrong sum.
    """
    out, lse = output
    if not inputs[Operands._fields.index("return_lse")]:
        raise ValueError("attn4::forward was called with return_lse=False, but its gradient needs the LSE")
    ctx.save_for_backward(out, lse, *inputs[:_TENSORS])
    ctx.settings = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of the operands: of Q, K and V as far as they are asked for."""
    out, lse, *tensors = ctx.saved_tensors
    operands = Operands(*tensors, *ctx.settings)
    nothing = (None,) * len(operands)
    if grad_out is None and grad_lse is None:
        return nothing
    gradients = _observed(grad_out, grad_lse, (out, lse), operands)
    wanted = [x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad[:3], strict=True)]
    return (*wanted, *nothing[3:])


def _observed(
    grad_out: Tensor | None, grad_lse: Tensor | None, results: tuple[Tensor, Tensor], operands: Operands
) -> Sequence[Tensor]:
    """Gradients of Q, K and V, in the way that whoever looks on can follow."""
    arguments = (grad_out, grad_lse, *results, *operands)
    given = [x for x in (grad_out, grad_lse, *operands[:3]) if x is not None]
    if torch.compiler.is_dynamo_compiling() or watched(*given):
        gradients: Sequence[Tensor] = torch.ops.attn4.backward(*arguments)
    elif torch.is_grad_enabled() or transformed():
        gradients = AttentionGradient.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        gradients = compute_gradient(grad_out, grad_lse, results, operands)
    return gradients


def refuse_second(_ctx: Any, *_gradients: Tensor | None) -> NoReturn:
    """The gradient of the gradient."""
    raise NotImplementedError(
        "second derivatives of attention are not built: it is once differentiable; detach the gradients, or "
        "write the attention in torch operations"
    )


def refuse_vmap(*_arguments: Any) -> NoReturn:
    """What torch.vmap calls."""
    raise NotImplementedError(
        "torch.vmap over attention is not built, but attention has a batch axis: reshape to (batch, seqlen, "
        "heads, head_dim), or use flash_attn_varlen_func"
    )


def refuse_tangent(_ctx: Any, *_tangents: Any) -> NoReturn:
    """What forward-mode differentiation calls."""
    raise NotImplementedError(
        "forward-mode derivatives of attention are not built; use reverse mode (backward, torch.func.grad)"
    )


class Attention(torch.autograd.Function):
    """Q, K, V, length vectors and what is ready for them to (out, lse), for eager calls.

    An operator of torch.library costs the host 100 us more, the form with ``setup_context`` 10, and each
    argument a fifth of one.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, ready: Ready) -> Any:
        """Out and LSE."""
        output = ready.launch(q, k, v, vectors, None)
        ctx.save_for_backward(*output, q, k, v, *(() if vectors is NO_VECTORS else vectors))
        ctx.ready = ready
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """Gradients of Q, K and V."""
        out, lse, q, k, v, *vectors = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return None, None, None, None, None
        given = tuple(vectors) if vectors else NO_VECTORS
        if (
            torch.is_grad_enabled()
            or watched(*[x for x in (grad_out, grad_lse) if x is not None])
            or transformed()
        ):
            operands = Operands(q, k, v, *given, *ctx.ready.settings)
            gradients = _observed(grad_out, grad_lse, (out, lse), operands)
        else:
            gradients = ctx.ready.gradient(grad_out, grad_lse, (q, k, v), (out, lse), given)
        dq, dk, dv = gradients
        wants_q, wants_k, wants_v, *_ = ctx.needs_input_grad
        return dq if wants_q else None, dk if wants_k else None, dv if wants_v else None, None, None


class TransformedAttention(torch.autograd.Function):
    """``Operands`` to (out, lse) in the form that functorch can look into."""

    @staticmethod
    def forward(*operands: Any) -> tuple[Tensor, Tensor]:
        """Out and LSE."""
        return compute(Operands(*operands))

    setup_context: Any = staticmethod(save)
    backward: Any = staticmethod(differentiate)
    vmap: Any = staticmethod(refuse_vmap)
    jvp: Any = staticmethod(refuse_tangent)


class AttentionGradient(torch.autograd.Function):
    """The backward pass as a node of its own, so that a derivative of it is an error and not 0."""

    @staticmethod
    def forward(
        grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *operands: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of Q, K and V."""
        return compute_gradient(grad_out, grad_lse, (out, lse), Operands(*operands))

    @staticmethod
    def setup_context(_ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept for a gradient that is refused."""

    backward: Any = staticmethod(refuse_second)
    vmap: Any = staticmethod(refuse_vmap)
    jvp: Any = staticmethod(refuse_tangent)
