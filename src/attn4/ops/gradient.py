"""The backward pass: which backend computes it, or why none does; and the launch of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from attn4.machine import Machine
from attn4.ops import gpu
from attn4.ops.call import Call, Vectors
from attn4.ops.reference import ReferenceGradient
from attn4.ops.workspace import counter, uninitialised
from attn4.plan.choose import choose, runnable
from attn4.plan.plan import Plan
from attn4.plan.workspace import workspace
from attn4.problem import Problem

Triple = tuple[Tensor, Tensor, Tensor]


class Gradient(Protocol):
    """The backward pass of calls of one signature."""

    def __call__(
        self,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        inputs: Triple,
        results: tuple[Tensor, Tensor],
        vectors: Vectors,
    ) -> Triple:
        """Gradients of Q, K and V from those of out and of the LSE, of which None is zero."""


def prepare_gradient(call: Call) -> Gradient:
    """The gradient of a legal call.

    Raises NotImplementedError where its backend has no backward pass for it.
    """
    refuse_without_gradient(call)
    if call.backend == "reference":
        return ReferenceGradient(call.softmax_scale, call.mask)
    return KernelGradient(
        problem=replace(call.problem(), direction="backward"),
        machine=gpu.target(call),
        load=gpu.loader(call),
        device=call.q.get_device(),
        several=gpu.several(call.q.get_device()),
        softmax_scale=call.softmax_scale,
        window=(gpu.bound(call.mask.left), gpu.bound(call.mask.right)),
        scattered=gpu.scattered(call),
        empty=gpu.idle(call),
        ctas=gpu.most_ctas(call),
    )


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


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The kernels of a pass, by one function, and tensors without memory like its results and like those that
    it works in.
    """

    function: Callable[..., None]
    counted: bool
    results: Triple
    room: Triple


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelGradient:
    """Backward kernels and their constant arguments.

    ``empty``: no query meets a key. ``scattered``: some inputs have strides that a kernel cannot take.
    ``several``: there are other GPUs, one of which may be the current one. ``ctas``: how many CTAs a
    persistent kernel is launched with at most. A kernel is loaded when it is first needed; there is one with
    a gradient of the LSE and one without.
    """

    problem: Problem
    machine: Machine
    load: Callable[[Plan], Callable[..., None]]
    device: int
    several: bool
    softmax_scale: float
    window: tuple[int, int]
    scattered: bool
    empty: bool
    ctas: int
    _kernels: dict[bool, Kernels] = field(default_factory=dict)

    def __call__(
        self,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        inputs: Triple,
        results: tuple[Tensor, Tensor],
        vectors: Vectors,
    ) -> Triple:
        """Gradients of Q, K and V; see ``Gradient``."""
        q, k, v = inputs
        if self.empty:
            return _zeros(q), _zeros(k), _zeros(v)
        if self.several and torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(grad_out, grad_lse, inputs, results, vectors)
        out, lse = results
        kernels = self._kernels.get(grad_lse is not None) or self._load(inputs, grad_lse is not None)
        like_q, like_k, like_v = kernels.results
        gradients = torch.empty_like(like_q), torch.empty_like(like_k), torch.empty_like(like_v)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        elif self.problem.may_have_empty_rows(_same_lengths(vectors)):
            grad_out = _without_empty_rows(grad_out, lse)
        if self.scattered:
            vectors = gpu.movable_vectors(vectors)
        if self.scattered or not gpu.aligned(q, k, v):
            q, k, v = gpu.movable(q), gpu.movable(k), gpu.movable(v)
        kernels.function(
            q,
            k,
            v,
            out,
            gpu.movable(grad_out),
            lse,
            None if grad_lse is None else grad_lse.contiguous(),
            *gradients,
            *uninitialised(kernels.room),
            self.softmax_scale,
            *self.window,
            *vectors[:4],
            counter(self.device) if kernels.counted else None,
            self.ctas,
        )
        return gradients

    def _load(self, inputs: Triple, with_lse: bool) -> Kernels:
        q, k, v = inputs
        plan = choose(replace(self.problem, lse=with_lse), self.machine)
        room = workspace(plan, self.problem.batch, q.shape[-2], q.shape[-3])

        def like(x: Tensor) -> Tensor:
            return gpu.without_memory(x.new_empty(x.shape))

        def memory(shape: tuple[int, ...]) -> Tensor:
            return gpu.without_memory(q.new_empty(shape, dtype=torch.float32))

        made = Kernels(
            self.load(plan),
            plan.schedule.counted,
            (like(q), like(k), like(v)),
            (memory(room.row_stats), memory(room.row_stats), memory(room.dq_sum)),
        )
        return self._kernels.setdefault(with_lse, made)


def _zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape)


def _same_lengths(vectors: Vectors) -> bool:
    """Whether the sequences of queries are those of keys, as one tensor says."""
    cu_q, cu_k, used_q, used_k, _ = vectors
    if cu_q is None or cu_k is None or used_q is not None or used_k is not None:
        return False
    return cu_q.data_ptr() == cu_k.data_ptr()


def _without_empty_rows(grad_out: Tensor, lse: Tensor) -> Tensor:
    """A copy of the gradient of out that is 0 where a query sees no key: a kernel multiplies its rows by
    weights of 0, and 0 times NaN would reach dK and dV.
    """
    return grad_out.masked_fill((lse == -torch.inf).transpose(-1, -2).unsqueeze(-1), 0)
