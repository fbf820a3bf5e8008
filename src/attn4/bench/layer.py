"""A transformer layer's attention, forward and backward, compiled: attn4 beside the backends of torch's SDPA.

``python -m attn4.bench.layer`` needs a GPU. A layer is the projection to Q, K and V, attention, and the
projection of its output, compiled into one graph (`torch.compile`, ``fullgraph=True``). Times are medians of
interleaved rounds; memory is what a forward and backward pass add to what is allocated before.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn4 import flash_attn_func
from attn4.artifact import use_bundle

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(batch, length, heads, head_dim) each."""

_cuda: Any = torch.cuda

HIDDEN = 2048
TOKENS = 16_384
ROUNDS = 7
SDPA = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer with one backend: milliseconds of a forward and backward pass, and MiB that it adds."""

    backend: str
    head_dim: int
    causal: bool
    seqlen: int
    milliseconds: float
    mebibytes: float
    error: float


class Layer(nn.Module):
    """Self-attention of ``HIDDEN`` columns."""

    def __init__(self, head_dim: int, attend: Attend) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attend = attend
        self.project = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False, device="cuda", dtype=torch.bfloat16)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) of both."""
        q, k, v = self.project(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        out: Tensor = self.out(self.attend(q, k, v).flatten(2))
        return out


def attends(causal: bool) -> dict[str, Attend]:
    """By name, what is compared."""

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, causal=causal)
        return out

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out.transpose(1, 2)

    return {"attn4": own, **dict.fromkeys(SDPA, sdpa)}


def compare(head_dim: int, causal: bool, seqlen: int) -> list[LayerRow]:
    """All backends on one shape, with the same weights and inputs."""
    x = torch.randn(TOKENS // seqlen, seqlen, HIDDEN, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    steps: dict[str, Callable[[], Tensor]] = {}
    for name, attend in attends(causal).items():
        torch.manual_seed(0)
        steps[name] = _step(name, Layer(head_dim, attend), x, grad)
    results = {name: step() for name, step in steps.items()}
    expected = results["sdpa-flash"].float()
    errors = {
        name: ((got.float() - expected).norm() / expected.norm()).item() for name, got in results.items()
    }
    memory = {name: _memory(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(_milliseconds(step))
    return [
        LayerRow(name, head_dim, causal, seqlen, statistics.median(times[name]), memory[name], errors[name])
        for name in steps
    ]


def _step(name: str, layer: Layer, x: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    leaf = x.detach().requires_grad_()
    wanted = (leaf, *layer.parameters())

    def step() -> Tensor:
        with sdpa_kernel(SDPA.get(name, SDPBackend.MATH)):
            out = compiled(leaf)
        return torch.autograd.grad(out, wanted, grad)[0]

    for _ in range(2):
        step()
    return step


def _memory(step: Callable[[], Tensor]) -> float:
    step()
    _cuda.synchronize()
    _cuda.reset_peak_memory_stats()
    before = _cuda.memory_allocated()
    step()
    _cuda.synchronize()
    added: int = _cuda.max_memory_allocated() - before
    return added / 2**20


def _milliseconds(step: Callable[[], Tensor], count: int = 4) -> float:
    begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        step()
    end.record()
    _cuda.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / count


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, and write rows to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, help="take attn4's kernels from here first")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    parser.add_argument("--seqlen", type=int, action="append", help="lengths (default 1024 and 4096)")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU with a CUDA build of torch")
    if args.bundle is not None:
        use_bundle(args.bundle)
    print("| layer | backend | ms | MiB | error |\n|---|---|---|---|---|")
    for head_dim, causal in ((64, True), (128, True), (128, False)):
        for seqlen in args.seqlen or (1024, 4096):
            for row in compare(head_dim, causal, seqlen):
                mask = "causal" if causal else "full"
                print(
                    f"| D {head_dim} {mask} {seqlen} | {row.backend} | {row.milliseconds:.2f} | "
                    f"{row.mebibytes:.0f} | {row.error:.1e} |",
                    flush=True,
                )
                if args.out is not None:
                    with args.out.open("a") as file:
                        print(json.dumps(asdict(row)), file=file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
