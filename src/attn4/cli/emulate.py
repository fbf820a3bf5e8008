"""Run attention's compiled kernel on an emulated GPU, and report what it did. Needs no GPU.

The result is compared with the formula in float32, hazards are looked for while the kernel runs, and its
instructions, bytes and products are counted by role.

  attn4 emulate --head-dim 64 --causal
  attn4 emulate --seqlen-q 200 --heads 4 --kv-heads 2 --varlen --schedule random --seed 7 --json

The exit status is 1 on a hazard or a wrong result, and 2 if there is no such kernel.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn4.cli.explain import bound
from attn4.mask import Mask
from attn4.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from attn4.emulator.gpu import Gpu
    from attn4.reference import Lengths

FAILED = 1
GRADIENTS = ("dq", "dk", "dv")
LSE_ERROR = 1e-5
_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``attn4 emulate``."""
    add = parser.add_argument
    add("--arch", default="sm_90a", help="sm_90a, sm_100a or sm_103a (default sm_90a)")
    add("--batch", type=int, default=1, help="sequences (default 1)")
    add("--seqlen-q", type=int, default=256, help="queries of a sequence (default 256)")
    add("--seqlen-k", type=int, help="keys of a sequence (default: as many as queries)")
    add("--heads", type=int, default=2, help="query heads (default 2)")
    add("--kv-heads", type=int, help="key/value heads (default: as many as query heads)")
    add("--head-dim", type=int, default=128, metavar="D", help="of Q, K and V (default 128)")
    add("--dtype", choices=tuple(_ROUNDOFF), default="bfloat16")
    add("--causal", action="store_true", help="query i sees keys up to i, aligned bottom right")
    add(
        "--window",
        type=bound,
        nargs=2,
        default=(None, None),
        metavar=("LEFT", "RIGHT"),
        help="inclusive bounds around the diagonal; none or -1: no bound",
    )
    add("--varlen", action="store_true", help="packed sequences, the first of the full length")
    add("--backward", action="store_true", help="the gradients instead of the output")
    add("--deterministic", action="store_true", help="bit-equal gradients in every run")
    add("--schedule", choices=("round_robin", "random", "adversarial", "eager"), default="round_robin")
    add("--seed", type=int, default=0, help="of the schedule and of the inputs (default 0)")
    add("--sms", type=int, default=4, help="multiprocessors of the device (default 4)")
    add("--no-hazards", dest="hazards", action="store_false", help="look for none: three times as fast")
    add("--strict", dest="hazards", action="store_const", const="strict", help="hold all to all rules of PTX")
    add("--json", action="store_true", help="the same as data")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is passed to the kernel and to the oracle; ``dout`` is the incoming gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Inputs:
        """Normal random numbers; packed lengths are random ones but for the first."""
        import torch

        generator = torch.Generator().manual_seed(args.seed)

        def starts(longest: int) -> Tensor:
            lengths = torch.randint(0, longest + 1, (args.batch,), generator=generator)
            lengths[:1] = longest
            return torch.cat((torch.zeros(1), lengths.cumsum(0))).int()

        cu_q, cu_k = (starts(args.seqlen_q), starts(args.seqlen_k)) if args.varlen else (None, None)

        def normal(cu_seqlens: Tensor | None, rows: int, heads: int) -> Tensor:
            lead = (args.batch, rows) if cu_seqlens is None else (int(cu_seqlens[-1]),)
            drawn = torch.randn(*lead, heads, args.head_dim, generator=generator)
            return drawn.to(getattr(torch, args.dtype))

        return cls(
            normal(cu_q, args.seqlen_q, args.heads),
            normal(cu_k, args.seqlen_k, args.kv_heads),
            normal(cu_k, args.seqlen_k, args.kv_heads),
            normal(cu_q, args.seqlen_q, args.heads),
            cu_q,
            cu_k,
        )

    @property
    def lengths(self) -> Lengths:
        """For the oracle."""
        from attn4.reference import Lengths

        return Lengths(cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k)


def run(args: argparse.Namespace) -> int:
    """Emulate the problem in ``args``."""
    from attn4.emulator import device

    args.seqlen_k = args.seqlen_q if args.seqlen_k is None else args.seqlen_k
    args.kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    _check(args)
    inputs = Inputs.of(args)
    started = time.perf_counter()
    with device(args.arch, schedule=args.schedule, seed=args.seed, hazards=args.hazards, sms=args.sms) as gpu:
        outputs = _attend(gpu, inputs, args)
    seconds = time.perf_counter() - started
    errors = _errors(outputs, inputs, args)
    bounds = dict.fromkeys(("out", *GRADIENTS), _ROUNDOFF[args.dtype]) | {"lse": LSE_ERROR}
    wrong = [name for name, error in errors.items() if error is None or not error <= bounds[name]]
    result = {
        "relative_l2": errors,
        "bounds": {name: bounds[name] for name in errors},
        "wrong": wrong,
        "hazards": [hazard.as_dict() for hazard in gpu.hazards],
        "counts": gpu.report.to_dict(),
        "seconds": round(seconds, 3),
    }
    options = {name: value for name, value in vars(args).items() if name not in ("command", "run", "json")}
    print(json.dumps({"problem": options} | result, indent=2) if args.json else _text(gpu, result))
    return FAILED if wrong or gpu.hazards else 0


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for a problem that makes no sense, NotImplementedError for one without a kernel."""
    from attn4.emulator.launch.device import Chip
    from attn4.machine import machine
    from attn4.plan.choose import invalid, runnable

    chip = Chip.of(args.arch, args.sms)
    problem = Problem(
        batch=args.batch,
        seqlen_q=args.seqlen_q,
        seqlen_k=args.seqlen_k,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        head_dim_v=args.head_dim,
        dtype=args.dtype,
        mask=Mask.of(args.causal, tuple(args.window)),
        cu_seqlens_q=args.varlen,
        cu_seqlens_k=args.varlen,
        direction="backward" if args.backward else "forward",
        deterministic=args.deterministic,
    )
    if wrong := invalid(problem):
        raise ValueError(" ".join(wrong))
    if missing := runnable(problem, machine(chip.arch)):
        raise NotImplementedError(" ".join(missing))


def _attend(gpu: Gpu, inputs: Inputs, args: argparse.Namespace) -> dict[str, Tensor]:
    """Out and LSE, or the gradients; nothing if a kernel was ended by a fault, which is among the device's
    hazards then.
    """
    import torch

    from attn4.api import flash_attn_func, flash_attn_varlen_func

    options: Any = {
        "causal": args.causal,
        "window_size": tuple(args.window),
        "deterministic": args.deterministic,
        "return_lse": True,
        "backend": "emulator",
        "arch": args.arch,
    }
    lengths: Any = {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
    try:
        q, k, v = (x.detach().requires_grad_(args.backward) for x in (inputs.q, inputs.k, inputs.v))
        if args.varlen:
            out, lse = flash_attn_varlen_func(q, k, v, **lengths, **options)
        else:
            out, lse = flash_attn_func(q, k, v, **options)
        if args.backward:
            return dict(zip(GRADIENTS, torch.autograd.grad(out, (q, k, v), inputs.dout), strict=True))
    except RuntimeError:
        if not any(grid.failure for grid in gpu.grids):
            raise
        return {}
    return {"out": out, "lse": lse}


def _expected(inputs: Inputs, args: argparse.Namespace) -> dict[str, Tensor]:
    """By the formula: out and LSE, or the gradients."""
    from attn4.reference import backward, dense
    from attn4.reference.backward import Saved

    q, k, v = (x.float() for x in (inputs.q, inputs.k, inputs.v))
    scale, mask, lengths = args.head_dim**-0.5, Mask.of(args.causal, tuple(args.window)), inputs.lengths
    out, lse = dense(q, k, v, softmax_scale=scale, mask=mask, lengths=lengths)
    if not args.backward:
        return {"out": out, "lse": lse}
    saved = Saved(q=q, k=k, v=v, out=out, lse=lse, lengths=lengths, softmax_scale=scale, mask=mask)
    return dict(zip(GRADIENTS, backward(saved, inputs.dout.float(), None), strict=True))


def _errors(outputs: dict[str, Tensor], inputs: Inputs, args: argparse.Namespace) -> dict[str, float | None]:
    """The relative L2 error of each output against the float32 oracle; None if it is not finite."""
    expected = _expected(inputs, args)
    found: dict[str, float | None] = {}
    for name, given in outputs.items():
        wanted = expected[name]
        # Rows that see no key have an LSE of -inf, which must be matched and has no distance.
        rows = wanted.isfinite()
        difference = (given.float() - wanted)[rows].norm().item()
        error = difference / max(wanted[rows].norm().item(), 1e-30)
        same = bool((given.float()[~rows] == wanted[~rows]).all())
        found[name] = error if same and math.isfinite(error) else None
    return found


def _text(gpu: Gpu, result: dict[str, Any]) -> str:
    lines = [str(gpu.report), ""]
    for name, error in result["relative_l2"].items():
        size = "not finite" if error is None else f"{error:.2e}"
        verdict = "wrong" if name in result["wrong"] else "right"
        lines.append(f"{name}: relative L2 error {size}, at most {result['bounds'][name]:.2e}: {verdict}")
    hazards = gpu.hazards
    lines.append(f"{len(hazards) or 'no'} hazard{'' if len(hazards) == 1 else 's'}")
    lines += [f"  {hazard}" for hazard in hazards]
    return "\n".join([*lines, f"{result['seconds']} s"])
