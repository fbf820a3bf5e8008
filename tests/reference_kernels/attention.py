"""One problem through flash_attn.cute, as a user calls it, beside the float32 oracle."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from attn4.emulator.schedule import Schedule
from attn4.reference import Lengths, dense
from reference_kernels.problem import Problem, starts
from reference_kernels.runtime import device


@dataclass(frozen=True, slots=True)
class Outcome:
    """``relative_l2`` of each result against float32, the largest error of LSE, and what ran.

    ``digest`` is of the bits of all results. ``kernels`` pairs a kernel's name with the instructions it took.
    ``hazards`` are sentences, none where nobody looked.
    """

    relative_l2: dict[str, float]
    lse_error: float
    digest: str
    kernels: tuple[tuple[str, int], ...]
    hazards: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True)
class Inputs:
    """q, k, v and the gradient of out; ``table`` says where the pages of each sequence lie."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    table: Tensor | None = None


def inputs(problem: Problem, seed: int = 0) -> Inputs:
    """Normal values; pages are dealt out at random, and those of no sequence are NaN."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def normal(side: str, heads: int, width: int) -> Tensor:
        return torch.randn((*problem.rows(side), heads, width), generator=generator).to(dtype)

    q = normal("q", problem.heads, problem.head_dim)
    k = normal("k", problem.kv_heads, problem.head_dim)
    v = normal("k", problem.kv_heads, problem.dim_v)
    grad_out = normal("q", problem.heads, problem.dim_v)
    table = None
    if problem.page:
        pages = problem.batch * problem.seqlen_k // problem.page
        table = torch.randperm(pages + 2, generator=generator)[:pages].reshape(problem.batch, -1).int()
    return Inputs(q, k, v, grad_out, table)


def paged(tensor: Tensor, table: Tensor) -> Tensor:
    """A tensor (batch, seqlen, heads, width) as pages (pages, rows, heads, width)."""
    batch, count = table.shape
    rows = tensor.shape[1] // count
    pages = torch.full((batch * count + 2, rows, *tensor.shape[2:]), torch.nan, dtype=tensor.dtype)
    pages[table.flatten().long()] = tensor.reshape(batch * count, rows, *tensor.shape[2:])
    return pages


def oracle(problem: Problem, given: Inputs) -> tuple[dict[str, Tensor], Tensor]:
    """out (and the gradients, where asked for) and LSE in float32."""
    q, k, v = (x.float().requires_grad_(problem.backward) for x in (given.q, given.k, given.v))
    lengths = Lengths(
        cu_seqlens_q=torch.tensor(starts(problem.lens_q)) if problem.lens_q else None,
        cu_seqlens_k=torch.tensor(starts(problem.lens_k)) if problem.lens_k else None,
    )
    out, lse = dense(q, k, v, mask=problem.mask, lengths=lengths)
    results = {"out": out.detach()}
    if problem.backward:
        out.backward(given.grad_out.float())
        results |= {"dq": q.grad, "dk": k.grad, "dv": v.grad}
    return results, lse.detach()


def attend(problem: Problem, given: Inputs) -> tuple[dict[str, Tensor], Tensor]:
    """What flash_attn.cute makes of it: out (and gradients) and LSE."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    leaves = [x.clone().requires_grad_(problem.backward) for x in (given.q, given.k, given.v)]
    q, k, v = leaves
    options = {
        "causal": problem.causal,
        "window_size": problem.window,
        "num_splits": problem.splits,
        "deterministic": problem.deterministic,
        "return_lse": True,
    }
    if given.table is not None:
        k, v = paged(k, given.table), paged(v, given.table)
        used = torch.full((problem.batch,), problem.seqlen_k, dtype=torch.int32)
        out, lse = flash_attn_varlen_func(q, k, v, page_table=given.table, seqused_k=used, **options)
    elif problem.lens_q:
        lengths = {
            "cu_seqlens_q": torch.tensor(starts(problem.lens_q), dtype=torch.int32),
            "cu_seqlens_k": torch.tensor(starts(problem.lens_k), dtype=torch.int32),
            "max_seqlen_q": max(problem.lens_q),
            "max_seqlen_k": max(problem.lens_k),
        }
        out, lse = flash_attn_varlen_func(q, k, v, **lengths, **options)
    else:
        out, lse = flash_attn_func(q, k, v, **options)
    results = {"out": out.detach()}
    if problem.backward:
        out.backward(given.grad_out)
        results |= dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))
    return results, lse.detach()


def judged(problem: Problem, schedule: Schedule, *, hazards: bool = False, seconds: float = 240) -> Outcome:
    """Run a problem on the emulator under ``schedule``, and hold its results against the oracle."""
    given = inputs(problem)
    expected, expected_lse = oracle(problem, given)
    with device(problem.arch, schedule, sms=problem.sms, seconds=seconds, hazards=hazards) as gpu:
        import flash_attn.cute  # noqa: F401  its import is not counted as time

        started = time.monotonic()
        results, lse = attend(problem, given)
        elapsed = time.monotonic() - started
    errors = {
        name: ((results[name].float() - value).norm() / value.norm()).item()
        for name, value in expected.items()
    }
    seen = expected_lse.isfinite()
    if not torch.equal(seen, lse.isfinite()):
        raise AssertionError("LSE must be -inf exactly where no key is seen")
    kernels = tuple((grid.program.kernel.name, grid.clock) for grid in gpu.grids)
    digest = hashlib.sha256(b"".join(x.float().numpy().tobytes() for x in (*results.values(), lse)))
    lse_error = (lse - expected_lse)[seen].abs().max().item()
    found = tuple(map(str, gpu.hazards))
    return Outcome(errors, lse_error, digest.hexdigest(), kernels, found, elapsed)
