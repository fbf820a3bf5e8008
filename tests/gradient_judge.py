"""The oracle of gradients, the yardstick, and the rule by which gradients pass.

As in `judge`: an error against the float32 oracle of at most twice that of torch in the result's own dtype,
plus one unit in the last place of the largest gradient; largest and root mean square error both count. Where
nothing is summed, a gradient is exactly 0: of a query that sees no key, and of a key that no query sees (its
dV is 0). (One key alone also gives a dS of 0, but by a difference that rounds.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn4.reference import Lengths, backward, forward
from attn4.reference.backward import Saved
from case_inputs import Inputs
from judge import FACTOR, eager_attention

NAMES = ("dq", "dk", "dv")
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Incoming:
    """Gradients of out and of the LSE (None where it has none), and the forward pass's results."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def incoming(case: Any, inputs: Inputs, seed: int = 1) -> Incoming:
    """Results of the forward pass in the dtype of Q, and random gradients; NaN where Q is none of a
    sequence.
    """
    out, lse = forward(
        inputs.q,
        inputs.k,
        inputs.v,
        softmax_scale=case.softmax_scale,
        mask=case.mask,
        lengths=Lengths(**inputs.lengths),
    )
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=generator).to(out)
    dout[inputs.q.isnan().any(dim=-1)] = torch.nan
    dlse = torch.randn(lse.shape, generator=generator).to(lse.device) if case.lse else None
    return Incoming(out, lse.float(), dout, dlse)


def gradient_oracle(case: Any, inputs: Inputs, given: Incoming) -> Gradients:
    """Gradients by their formula in float32."""
    q, k, v = (x.float() for x in (inputs.q, inputs.k, inputs.v))
    lengths = Lengths(**inputs.lengths)
    options = {"softmax_scale": case.softmax_scale, "mask": case.mask, "lengths": lengths}
    out, lse = forward(q, k, v, **options)
    return backward(Saved(q=q, k=k, v=v, out=out, lse=lse, **options), given.dout.float(), given.dlse)


def eager_gradients(case: Any, inputs: Inputs, given: Incoming) -> Gradients:
    """What torch's autograd makes of plain operations in the dtype of the inputs."""
    lengths = Lengths(**inputs.lengths)
    tensors = inputs.q, inputs.k, inputs.v
    results = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors)
    q, dq, dout = (lengths.batched_q(x) for x in (inputs.q, results[0], given.dout))
    k, v, dk, dv = (lengths.batched_k(x) for x in (inputs.k, inputs.v, *results[1:]))
    dlse = None if given.dlse is None else lengths.batched_q(given.dlse)
    for part in lengths.parts(q, k):
        leaves = [x.detach().clone().requires_grad_() for x in (part.of_q(q), part.of_k(k), part.of_k(v))]
        out, lse = eager_attention((leaves[0], leaves[1], leaves[2]), case.mask, case.softmax_scale)
        torch.autograd.backward(
            [out] if dlse is None else [out, lse],
            [part.of_q(dout)] if dlse is None else [part.of_q(dout), part.of_lse(dlse)],
        )
        for target, leaf in zip((part.of_q(dq), part.of_k(dk), part.of_k(dv)), leaves, strict=True):
            target.copy_(leaf.grad)
    return results


def judge_gradients(found: Gradients, truth: Gradients, yardstick: Gradients, given: Incoming) -> None:
    """Raise AssertionError unless ``found`` is as good as the rule at the top asks."""
    for name, result, expected, other in zip(NAMES, found, truth, yardstick, strict=True):
        assert result.shape == expected.shape
        assert result.isfinite().all(), f"{int((~result.isfinite()).sum())} elements of {name} are not finite"
        empty = (
            given.lse.transpose(-1, -2) == -torch.inf if name == "dq" else truth[2].abs().amax(dim=-1) == 0
        )
        assert result[empty].count_nonzero() == 0, f"{name} must be exactly 0 where nothing is summed"
        limit = torch.finfo(result.dtype).eps * expected.abs().max().item()
        error, allowed = (result - expected).abs(), (other - expected).abs()
        for kind, measure in (("largest", torch.amax), ("root mean square", _rms)):
            value, bound = measure(error).item(), FACTOR * measure(allowed).item() + limit
            assert value <= bound, f"{kind} error of {name} is {value:.3e}, allowed is {bound:.3e}"


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
