"""Launching a kernel, with all that can be decided once per signature decided in advance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn4.artifact import kernel_for
from attn4.machine import Machine, machine
from attn4.ops import emulated, workspace
from attn4.ops.call import Call, Vectors
from attn4.ops.schedule import check_plan
from attn4.plan.choose import choose, invalid, runnable
from attn4.plan.plan import Plan
from attn4.plan.sorting import with_sorted_batches

ALIGNMENT_BYTES = 16
"""Copy engines take addresses and strides in multiples of 16 bytes."""

UNBOUNDED = 2**30
"""A window bound past any row index, and still far from the end of int32."""

_ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

# torch.cuda.current_device first checks that CUDA is initialised, which a CUDA tensor proves.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launch:
    """A kernel and its constant arguments. ``kernel`` is None where no query meets a key.

    ``out_like`` and ``lse_like`` have the shape of the results and no memory. ``scattered``: some inputs have
    strides that a kernel cannot take. ``several``: there are other GPUs, one of which may be the current one.
    """

    kernel: Callable[..., None] | None
    device: int
    several: bool
    out_like: Tensor
    lse_like: Tensor | None
    softmax_scale: float
    window_left: int
    window_right: int
    counted: bool
    ctas: int
    scattered: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, out: Tensor | None) -> Any:
        """Out, or (out, lse). ``out`` has been checked."""
        if self.several and _current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(q, k, v, vectors, out)
        if out is None:
            out = torch.empty_like(self.out_like)
        lse = None if self.lse_like is None else torch.empty_like(self.lse_like)
        if self.kernel is None:
            return _fill_empty(out, lse)
        if self.scattered:
            q, k, v, vectors = movable(q), movable(k), movable(v), movable_vectors(vectors)
        cu_q, cu_k, used_q, used_k, order = vectors
        try:
            self.kernel(
                q,
                k,
                v,
                out,
                lse,
                self.softmax_scale,
                self.window_left,
                self.window_right,
                cu_q,
                cu_k,
                used_q,
                used_k,
                order,
                workspace.counter(self.device) if self.counted else None,
                self.ctas,
            )
        except ValueError:
            # A kernel looks at the addresses itself: to ask for them in each call costs half a microsecond.
            if aligned(q, k, v):
                raise
            return self(movable(q), movable(k), movable(v), vectors, out)
        return out if lse is None else (out, lse)


def prepare(call: Call) -> Launch:
    """Choose a plan and load its kernel, for the GPU of the tensors or for the emulator.

    Raises ValueError for what no GPU can run and NotImplementedError for what this one cannot, with
    every reason.
    """
    device = call.q.get_device()
    problem = call.problem()
    wrong = invalid(problem)
    if wrong:
        raise ValueError(" ".join(wrong))
    where = target(call)
    missing = runnable(problem, where)
    if missing:
        raise NotImplementedError(" ".join(missing))
    plan = None if idle(call) else choose(problem, where)
    if call.schedule is not None and plan is not None:
        check_plan(call.schedule, plan)
        plan = with_sorted_batches(plan)
    return Launch(
        kernel=None if plan is None else loader(call)(plan),
        device=device,
        several=several(device),
        out_like=without_memory(call.q.new_empty(call.out_shape)),
        lse_like=without_memory(call.q.new_empty(call.lse_shape, dtype=torch.float32))
        if call.return_lse
        else None,
        softmax_scale=call.softmax_scale,
        window_left=bound(call.mask.left),
        window_right=bound(call.mask.right),
        counted=plan is not None and plan.schedule.counted,
        ctas=most_ctas(call),
        scattered=scattered(call),
    )


def idle(call: Call) -> bool:
    """Whether no query meets a key, so that nothing is launched: a kernel reads the lengths of the first
    sequence before it knows whether there is one.
    """
    return call.batch == 0 or 0 in call.out_shape or 0 in call.k.shape


def several(device: int) -> bool:
    """Whether another GPU than ``device`` may be the current one."""
    return device >= 0 and torch.cuda.device_count() > 1


def most_ctas(call: Call) -> int:
    """How many CTAs a persistent kernel is launched with at most: one for each SM."""
    return sm_count(call.q.get_device()) if call.backend == "gpu" else emulated.CTAS


def target(call: Call) -> Machine:
    """The machine that a call on a kernel is for: the GPU of the tensors, or what the emulator is to be."""
    if call.backend == "gpu":
        return machine_of(call.q.get_device())
    return machine(call.arch or emulated.ARCHITECTURE)


def loader(call: Call) -> Callable[[Plan], Callable[..., None]]:
    """What makes a kernel of a plan, for where the call runs."""
    return kernel_for if call.backend == "gpu" else emulated.emulated_kernel


def machine_of(device: int) -> Machine:
    """The architecture of a GPU. Raises NotImplementedError for one that attn4 does not know."""
    capability = torch.cuda.get_device_capability(device)
    if capability not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES.values()))
        raise NotImplementedError(
            f"{torch.cuda.get_device_name(device)} is sm_{capability[0]}{capability[1]}; attn4 is written "
            f"for {known}: use such a GPU, or backend='reference'"
        )
    return machine(_ARCHITECTURES[capability])


def sm_count(device: int) -> int:
    """The streaming multiprocessors of a GPU, which is how many CTAs a persistent grid has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def bound(given: int | None) -> int:
    """A bound of a window as kernels take it."""
    return UNBOUNDED if given is None else max(-UNBOUNDED, min(given, UNBOUNDED))


def scattered(call: Call) -> bool:
    """Whether strides alone demand a copy."""
    lengths = call.lengths
    vectors = (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_q, lengths.seqused_k)
    return any(map(_uneven, (call.q, call.k, call.v))) or any(
        x is not None and not x.is_contiguous() for x in vectors
    )


def _uneven(x: Tensor) -> bool:
    return any(stride * x.element_size() % ALIGNMENT_BYTES for stride in x.stride()[:-1])


def without_memory(x: Tensor) -> Tensor:
    """``x``, its memory given back: torch.empty_like of it is quicker than torch.empty of a shape."""
    x.untyped_storage().resize_(0)
    return x


def aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether copy engines can take the addresses."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT_BYTES == 0


def movable(x: Tensor) -> Tensor:
    """``x`` itself, or a contiguous copy where the copy engine could not take it."""
    if x.data_ptr() % ALIGNMENT_BYTES == 0:
        if x.is_contiguous() and x.shape[-1] * x.element_size() % ALIGNMENT_BYTES == 0:
            return x
        if x.stride(-1) == 1 and not _uneven(x):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def movable_vectors(vectors: Vectors) -> Vectors:
    """The length tensors, contiguous."""
    cu_q, cu_k, used_q, used_k, order = vectors
    return (_contiguous(cu_q), _contiguous(cu_k), _contiguous(used_q), _contiguous(used_k), order)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _fill_empty(out: Tensor, lse: Tensor | None) -> Any:
    out.zero_()
    if lse is None:
        return out
    return out, lse.fill_(-torch.inf)
