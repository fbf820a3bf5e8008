"""The gradient of attention: what is saved for it and how it is taken, by eager calls and operators alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from attn4.ops.gradient import Gradient
from attn4.ops.operands import Operands
from attn4.ops.prepared import Launch, compute, compute_gradient, gradient_for
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
    arguments = (grad_out, grad_lse, out, lse, *operands)
    given = [x for x in (grad_out, grad_lse, *operands[:3]) if x is not None]
    if torch.compiler.is_dynamo_compiling() or watched(*given):
        gradients = torch.ops.attn4.backward(*arguments)
    elif torch.is_grad_enabled() or transformed():
        gradients = AttentionGradient.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        gradient = getattr(ctx, "gradient", None) or gradient_for(operands)
        gradients = gradient(grad_out, grad_lse, operands[:3], (out, lse), operands.vectors)
    wanted = [x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad[:3], strict=True)]
    return (*wanted, *nothing[3:])


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


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """What eager calls of one signature share: operands that are not tensors, and both passes."""

    settings: tuple[Any, ...]
    launch: Launch
    gradient: Gradient


class Attention(torch.autograd.Function):
    """``Operands`` and what is ready for them to (out, lse), for eager calls.

    An operator of torch.library costs the host 100 us more, and the form with ``setup_context`` 10.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Out and LSE."""
        *inputs, ready = arguments
        operands = Operands(*inputs)
        output = ready.launch(*operands[:3], operands.vectors, None)
        save(ctx, operands, output)
        ctx.gradient = ready.gradient
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of Q, K and V."""
        return (*differentiate(ctx, *gradients), None)


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
