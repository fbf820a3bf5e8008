"""The reference as a backend: torch operations on any device, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn4.mask import Mask
from attn4.ops.call import Call, Vectors
from attn4.reference import Lengths, backward, forward
from attn4.reference.backward import Saved


@dataclass(frozen=True, slots=True)
class ReferenceLaunch:
    """Called like a ``gpu.Launch``; the LSE is float64 for float64 inputs."""

    call: Call

    @property
    def out_like(self) -> Tensor:
        """A tensor like out, with one element's memory."""
        return self.call.q.new_empty(1).expand(self.call.out_shape)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, out: Tensor | None) -> Any:
        """Out, or (out, lse). ``out`` has been checked."""
        call = self.call
        with as_written(q.device):
            result, lse = forward(
                q, k, v, softmax_scale=call.softmax_scale, mask=call.mask, lengths=_lengths(vectors)
            )
        if out is not None:
            result = out.copy_(result)
        return (result, lse) if call.return_lse else result


@dataclass(frozen=True, slots=True)
class ReferenceGradient:
    """Called like a kernel's gradient (``gradient.Gradient``).

    A graph keeps it, so it holds no tensor: what is saved is for autograd to hold, to hand to hooks, to free.
    """

    softmax_scale: float
    mask: Mask

    def __call__(
        self,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        inputs: tuple[Tensor, Tensor, Tensor],
        results: tuple[Tensor, Tensor],
        vectors: Vectors,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of Q, K and V."""
        saved = Saved(
            q=inputs[0],
            k=inputs[1],
            v=inputs[2],
            out=results[0],
            lse=results[1],
            lengths=_lengths(vectors),
            softmax_scale=self.softmax_scale,
            mask=self.mask,
        )
        with as_written(inputs[0].device):
            return backward(saved, grad_out, grad_lse)


@contextmanager
def as_written(device: torch.device) -> Iterator[None]:
    """No autocast: the products in here have the dtypes that they say."""
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield


def _lengths(vectors: Vectors) -> Lengths:
    return Lengths(
        cu_seqlens_q=vectors[0], cu_seqlens_k=vectors[1], seqused_q=vectors[2], seqused_k=vectors[3]
    )
