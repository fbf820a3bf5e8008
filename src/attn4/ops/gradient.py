"""Which backend computes a gradient, or why none does."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from attn4.ops import gpu
from attn4.ops.call import Call, Vectors
from attn4.ops.reference import ReferenceGradient
from attn4.plan.choose import runnable


class Gradient(Protocol):
    """The backward pass of calls of one signature."""

    def __call__(
        self,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        inputs: tuple[Tensor, Tensor, Tensor],
        results: tuple[Tensor, Tensor],
        vectors: Vectors,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of Q, K and V from those of out and of the LSE, of which None is zero."""


def prepare_gradient(call: Call) -> Gradient:
    """The gradient of a legal call.

    Raises NotImplementedError where its backend has no backward pass for it.
    """
    refuse_without_gradient(call)
    return ReferenceGradient(call)


def refuse_without_gradient(call: Call) -> None:
    """Raise NotImplementedError, with every reason, where the backend has no backward pass for the call."""
    if call.backend == "reference":
        return
    reasons = runnable(replace(call.problem(), direction="backward"), gpu.target(call))
    if reasons:
        raise NotImplementedError(
            f"q, k or v requires a gradient. {' '.join(reasons)} Without gradients: torch.no_grad(), or "
            "detach the tensors."
        )
