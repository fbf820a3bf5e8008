"""The table of what runs where, from the same predicates that raise the errors.

``python -m attn4.plan.support > docs/support.md`` renews the page.
"""

from __future__ import annotations

from dataclasses import replace

from attn4.machine import MACHINES, Machine
from attn4.mask import Mask
from attn4.plan.choose import runnable, unsupported
from attn4.problem import Problem

PLAIN = Problem(batch=2, seqlen_q=4096, seqlen_k=4096, heads=8, kv_heads=8, head_dim=128, head_dim_v=128)


def _dims(head_dim: int, head_dim_v: int) -> Problem:
    return replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v)


def _backward(problem: Problem) -> Problem:
    return replace(problem, direction="backward")


CASES = (
    ("forward, bfloat16", PLAIN),
    ("forward, float16", replace(PLAIN, dtype="float16")),
    ("forward, float32", replace(PLAIN, dtype="float32")),
    ("head dim 8", _dims(8, 8)),
    ("head dim 64", _dims(64, 64)),
    ("head dim 96", _dims(96, 96)),
    ("head dim 192", _dims(192, 192)),
    ("head dim 256", _dims(256, 256)),
    ("head dim 264", _dims(264, 264)),
    ("head dim 100", _dims(100, 100)),
    ("head dims 192 and 128 (V)", _dims(192, 128)),
    ("head dims 128 and 64 (V)", _dims(128, 64)),
    ("causal", replace(PLAIN, mask=Mask.of(True))),
    ("window", replace(PLAIN, mask=Mask.of(False, (1024, 0)))),
    ("8 query heads on 2", replace(PLAIN, kv_heads=2)),
    ("8 query heads on 3", replace(PLAIN, kv_heads=3)),
    ("cu_seqlens", replace(PLAIN, cu_seqlens_q=True, cu_seqlens_k=True)),
    ("seqused", replace(PLAIN, seqused_q=True, seqused_k=True)),
    ("no LSE", replace(PLAIN, lse=False)),
    ("backward", _backward(PLAIN)),
    ("backward, deterministic", _backward(replace(PLAIN, deterministic=True))),
    (
        "backward, window, 8 query heads on 2",
        _backward(replace(PLAIN, mask=Mask.of(False, (1024, 0)), kv_heads=2)),
    ),
    ("backward, cu_seqlens", _backward(replace(PLAIN, cu_seqlens_q=True, cu_seqlens_k=True))),
    ("backward, head dim 64", _backward(_dims(64, 64))),
    ("backward, head dim 256", _backward(_dims(256, 256))),
    ("backward, head dims 192 and 128 (V)", _backward(_dims(192, 128))),
)
"""Named problems, one a row of the table."""

INTRODUCTION = """\
# What is supported where

Made by `python -m attn4.plan.support > docs/support.md` from the predicates that also raise the errors
(`unsupported` and `runnable` in `attn4/plan/choose.py`); a test fails when this page is stale.

- **runs**: a kernel is there. Those for Hopper ran on an H200; those for Blackwell ran on the emulator only.
- planned: `attn4 explain` shows the plan; no kernel is built from it yet.
- no: no plan.

Everything below also runs on the reference path (`backend="reference"`), on every device.
Numbers refer to the reasons under the table. Unless a row says otherwise: forward, bfloat16, head dim 128,
full mask.
"""


IN_PYTORCH = """\
## In PyTorch

The same for every backend that computes the pass at all; a gradient that it does not compute is refused
before the forward pass runs.

| feature | |
| --- | --- |
| gradients of q, k, v by out and LSE | **runs**; only those that are required |
| `deterministic=True` | forward always; backward as the table says, the reference always |
| `torch.compile(fullgraph=True)`, dynamic lengths | **runs**: one operator in the graph |
| `torch.export`, FakeTensor, meta tensors | **runs** |
| `torch.autocast` | **runs**: q, k and v in the dtype of the region |
| `torch.utils.checkpoint`, also by operator | **runs** |
| `torch.func.grad`, `vjp` | **runs** |
| second derivatives, forward mode (`jvp`), `torch.vmap` | refused |
| `out=` | without gradients |
"""
"""What other tests than those of problems show: tests/host/test_operators.py, test_compile.py."""


def page() -> str:
    """The text of docs/support.md."""
    notes: dict[str, int] = {}
    head = ["case", *(f"{machine.chip} ({machine.name})" for machine in MACHINES)]
    lines = [_row(head), _row(["---"] * len(head))]
    for name, problem in CASES:
        lines.append(_row([name, *(_cell(problem, machine, notes) for machine in MACHINES)]))
    reasons = [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join([INTRODUCTION, *lines, "", *reasons, "", IN_PYTORCH])


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(problem: Problem, machine: Machine, notes: dict[str, int]) -> str:
    reasons = runnable(problem, machine)
    if not reasons:
        return "**runs**"
    word = "no" if unsupported(problem, machine) else "planned"
    numbers = (notes.setdefault(reason, len(notes) + 1) for reason in reasons)
    return f"{word} ({', '.join(map(str, numbers))})"


if __name__ == "__main__":
    print(page(), end="")
