"""Gradients at sizes where 32-bit indices and launch limits break, by value where an oracle can afford it."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cases import case
from gradient_judge import Incoming, eager_gradients, gradient_oracle, incoming, judge_gradients
from large import need_memory
from poison import poisoned_memory

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("free_memory")]

MOST_ERROR = 1e-2
"""Of a part of a gradient, relative, in the L2 norm; rounding operands to bfloat16 gives 2.4e-3."""

CHUNK = 2**19
"""Query rows for which scores are computed at once."""


@dataclass(frozen=True)
class Pass:
    """A call and its gradients, large tensors all of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def differentiate(name, **changes):
    named = replace(case(name), **changes)
    inputs = named.inputs("cuda")
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    with poisoned_memory():
        out, lse = named.run(inputs.with_tensors(*leaves))
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    tensors = (*(x.detach() for x in leaves), out.detach(), lse.detach(), dout, dlse, *found)
    return named, Pass(*tensors)


def close(found, truth):
    """Whether a part of a gradient is right."""
    found, truth = found.double(), truth.double()
    return (found - truth).norm().item() <= MOST_ERROR * truth.norm().item()


def score_gradients(scores, lse, dp, delta):
    """P and dS of rows, from scaled scores and logs of denominators, dO V^T and rowsum(dO * O) - dLSE."""
    weights = (scores - lse[..., None]).exp()
    return weights, weights * (dp - delta[..., None])


def deltas(done: Pass):
    """rowsum(dO * O) - dLSE, (batch, rows, heads). Out is the kernel's, which other tests judge."""
    pieces = [
        (x.float() * y.float()).sum(dim=-1)
        for x, y in zip(done.dout.split(4096, dim=1), done.out.split(4096, dim=1), strict=True)
    ]
    return torch.cat(pieces, dim=1) - done.dlse.transpose(1, 2)


@pytest.mark.parametrize("name", ["long causal", "long bhsd 256", "batch 65537", "71280 heads"])
def test_whole_gradients(name):
    named = case(name)
    inputs = named.inputs("cuda")
    given = incoming(named, inputs)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    with poisoned_memory():
        found = torch.autograd.grad(named.run(inputs.with_tensors(*leaves)), leaves, (given.dout, given.dlse))
    judge_gradients(
        found, gradient_oracle(named, inputs, given), eager_gradients(named, inputs, given), given
    )


def test_80000_segments():
    """Equal segments are a padded batch in disguise, for which the oracle needs no loop."""
    named, done = differentiate("80000 segments")
    count, rows = len(named.lens_q), named.lens_q[0]
    padded = replace(named, lens_q=None, lens_k=None, batch=count, seqlen_q=rows, seqlen_k=rows)

    def folded(x):
        return x.unflatten(0, (count, rows))

    def folded_lse(x):
        return x.unflatten(1, (count, rows)).transpose(0, 1).contiguous()

    inputs = replace(
        padded.inputs("cuda").with_tensors(folded(done.q), folded(done.k), folded(done.v)), lengths={}
    )
    given = Incoming(folded(done.out), folded_lse(done.lse), folded(done.dout), folded_lse(done.dlse))
    found = tuple(folded(x) for x in (done.dq, done.dk, done.dv))
    judge_gradients(
        found, gradient_oracle(padded, inputs, given), eager_gradients(padded, inputs, given), given
    )


@pytest.mark.fault("D13")
def test_more_than_2_to_31_elements_in_q():
    """Under no mask all queries of the heads of a group are rows of one matrix.

    A million of them: of the 17 million of one group the tensor core's sums, cut off at each addition, lose
    2.6% (docs/numerics.md).
    """
    need_memory(60)
    named, done = differentiate("more than 2**31 elements in q", kv_heads=16)
    assert done.dq.numel() > 2**31
    delta, lse, group = deltas(done), done.lse.transpose(1, 2), named.heads // named.kv_heads
    for head in range(named.kv_heads):
        members = slice(head * group, (head + 1) * group)
        key, value = done.k[0, :, head].float(), done.v[0, :, head].float()
        dk, dv = torch.zeros_like(key, dtype=torch.float64), torch.zeros_like(value, dtype=torch.float64)
        rows = [x[0, :, members].flatten(0, 1) for x in (done.q, done.dout, done.dq, lse, delta)]
        for q, dout, dq, *stats in zip(*(x.split(CHUNK) for x in rows), strict=True):
            q, dout = q.float(), dout.float()
            weights, ds = score_gradients(q @ key.T * named.softmax_scale, stats[0], dout @ value.T, stats[1])
            assert close(dq, ds @ key * named.softmax_scale)
            dk += ds.T @ q * named.softmax_scale
            dv += weights.T @ dout
        assert close(done.dk[0, :, head], dk)
        assert close(done.dv[0, :, head], dv)


@pytest.mark.fault("D13")
def test_more_than_2_to_31_elements_in_k():
    need_memory(60)
    named, done = differentiate("more than 2**31 elements in k")
    assert done.dk.numel() > 2**31
    delta = deltas(done)
    for batch in (0, 8, 15, 16):
        used = named.used_k[batch]
        q, dout = done.q[batch, :, 0].float(), done.dout[batch, :, 0].float()
        key, value = done.k[batch, :used, 0].float(), done.v[batch, :used, 0].float()
        weights, ds = score_gradients(
            q @ key.T * named.softmax_scale, done.lse[batch, 0], dout @ value.T, delta[batch, :, 0]
        )
        assert close(done.dq[batch, :, 0], ds @ key * named.softmax_scale)
        assert close(done.dk[batch, :used, 0], ds.T @ q * named.softmax_scale)
        assert close(done.dv[batch, :used, 0], weights.T @ dout)
        assert done.dk[batch, used:].count_nonzero() == 0
        assert done.dv[batch, used:].count_nonzero() == 0


@pytest.mark.fault("D10", "D11")
def test_4_million_keys():
    need_memory(60)
    named, done = differentiate("4 million keys")
    shift = named.seqlen_k - named.seqlen_q
    delta = deltas(done)[0].T
    q, dout = (x[0].float().transpose(0, 1) for x in (done.q, done.dout))
    key, value = done.k[0, :, 0], done.v[0, :, 0]
    for row in (0, 1, 1000, 2047):
        seen = slice(0, row + shift + 1)
        here = q[:, row], dout[:, row]
        scores = here[0] @ key[seen].float().T * named.softmax_scale
        _, ds = score_gradients(scores, done.lse[0, :, row], here[1] @ value[seen].float().T, delta[:, row])
        assert close(done.dq[0, row], ds @ key[seen].float() * named.softmax_scale)
    for first in (0, 2**20 + 77, 2**21 - 100, shift - 256, named.seqlen_k - 512):
        keys = slice(first, first + 512)
        columns = torch.arange(first, first + 512, device="cuda")
        seen = columns <= torch.arange(named.seqlen_q, device="cuda")[:, None] + shift
        scores = (q @ key[keys].float().T * named.softmax_scale).masked_fill(~seen, -torch.inf)
        weights, ds = score_gradients(scores, done.lse[0], dout @ value[keys].float().T, delta)
        assert close(done.dk[0, keys, 0], torch.einsum("hqk,hqd->kd", ds, q) * named.softmax_scale)
        assert close(done.dv[0, keys, 0], torch.einsum("hqk,hqd->kd", weights, dout))
