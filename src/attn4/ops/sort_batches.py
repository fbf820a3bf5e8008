"""Making scheduler metadata: the pre-pass kernel on the GPU of the lengths, or on the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn4.artifact import kernel_for
from attn4.machine import machine
from attn4.mask import Mask
from attn4.ops import emulated
from attn4.ops.check import GPU_DTYPES, backend_of, emulated_arch, window_of
from attn4.ops.check_lengths import check_max_seqlen, check_vector
from attn4.ops.gpu import bound, machine_of
from attn4.ops.schedule import LENGTHS, MadeFor, SchedulerMetadata, tile_of
from attn4.plan.choose import choose, invalid, runnable
from attn4.plan.plan import Plan
from attn4.plan.sorting import sorting_plan
from attn4.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The calls that metadata is made for, but for the lengths; as the user gave it, unchecked."""

    heads: Any
    kv_heads: Any
    head_dim: Any
    head_dim_v: Any
    dtype: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    causal: Any
    window_size: Any

    def problem(self, batch: int, lengths: tuple[str, ...]) -> Problem:
        """The problem whose plan decides. Raises TypeError or ValueError for what cannot be asked."""
        longest = {
            name: check_max_seqlen(name, getattr(self, name)) for name in ("max_seqlen_q", "max_seqlen_k")
        }
        sizes = {"num_heads_q": self.heads, "num_heads_kv": self.kv_heads, "headdim": self.head_dim}
        for name, value in (longest | sizes).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if self.dtype not in GPU_DTYPES:
            raise ValueError(f"qkv_dtype is {self.dtype}; kernels take {GPU_DTYPES[0]} and {GPU_DTYPES[1]}")
        return Problem(
            batch=batch,
            seqlen_q=self.max_seqlen_q,
            seqlen_k=self.max_seqlen_k,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim if self.head_dim_v is None else self.head_dim_v,
            dtype="bfloat16" if self.dtype == torch.bfloat16 else "float16",
            mask=Mask.of(bool(self.causal), window_of(self.window_size)),
            cu_seqlens_q="cu_seqlens_q" in lengths,
            cu_seqlens_k="cu_seqlens_k" in lengths,
            seqused_q="seqused_q" in lengths,
            seqused_k="seqused_k" in lengths,
        )


def make(
    vectors: tuple[Tensor | None, ...], request: Request, backend: str | None, arch: str | None
) -> SchedulerMetadata:
    """Sort the sequences whose lengths are in ``vectors``, in the order of ``LENGTHS``."""
    named = {name: x for name, x in zip(LENGTHS, vectors, strict=True) if x is not None}
    if not named:
        raise ValueError(
            f"get_scheduler_metadata needs at least one of {', '.join(LENGTHS)}: sequences of one length "
            "need no order; leave scheduler_metadata out"
        )
    batch, device = _checked_batch(named)
    lengths = tuple(named)
    chosen = backend_of(backend, device)
    target = emulated_arch(arch, chosen) if chosen == "emulator" else "reference"
    problem = request.problem(batch, lengths)
    made_for = MadeFor(batch, problem.mask, lengths, str(device), target or "", None)
    if chosen == "reference":
        return SchedulerMetadata(torch.arange(batch + 1, dtype=torch.int32, device=device), made_for)
    where = machine_of(device.index) if chosen == "gpu" else machine(made_for.target)
    plan = _plan(problem, where.name)
    made_for = replace(made_for, target=where.name, tile=tile_of(plan))
    order = torch.empty(batch + 1, dtype=torch.int32, device=device)
    sort = kernel_for if chosen == "gpu" else emulated.emulated_kernel
    _launch(sort(sorting_plan(plan)), order, problem, vectors)
    return SchedulerMetadata(order, made_for)


def _checked_batch(named: dict[str, Tensor]) -> tuple[int, torch.device]:
    """How many sequences the lengths are of, all alike, and where they lie."""
    name, first = next(iter(named.items()))
    if not isinstance(first, Tensor) or first.dim() != 1 or first.numel() < name.startswith("cu_"):
        raise ValueError(f"{name} must be an int32 vector of the lengths of sequences, got {first!r:.80}")
    batch = first.numel() - name.startswith("cu_")
    for name, x in named.items():
        check_vector(name, x, batch + name.startswith("cu_"), first.device)
    return batch, first.device


def _plan(problem: Problem, where: str) -> Plan:
    target = machine(where)
    wrong = invalid(problem)
    if wrong:
        raise ValueError(" ".join(wrong))
    missing = runnable(problem, target)
    if missing:
        raise NotImplementedError(" ".join(missing))
    return choose(problem, target)


def _launch(kernel: Any, order: Tensor, problem: Problem, vectors: tuple[Tensor | None, ...]) -> None:
    window = (bound(problem.mask.left), bound(problem.mask.right))
    lengths = tuple(None if x is None else x.contiguous() for x in vectors)
    arguments = (order, problem.seqlen_q, problem.seqlen_k, *window, *lengths)
    if order.is_cuda:
        with torch.cuda.device(order.device):
            kernel(*arguments)
    else:
        kernel(*arguments)
