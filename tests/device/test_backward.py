"""Gradients of the kernels against the float32 oracle, over the whole list of cases, into poisoned memory."""

from dataclasses import replace

import pytest
import torch

from attn4.machine import machine
from attn4.plan.choose import unsupported
from cases import CASES, ORDERED, case
from gradient_judge import eager_gradients, gradient_oracle, incoming, judge_gradients
from poison import poisoned_memory

ROUNDED_AWAY = ("one huge key",)
"""Scores of 1e12: their LSE in float32 is rounded by more than 1e4, so no weight can be told from it."""


def differentiable(case):
    return not unsupported(replace(case.problem(), direction="backward"), machine("sm_90a"))


def gradients(case, inputs, given, **options):
    """Through the public function and autograd."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    result = case.run(replace(inputs, q=leaves[0], k=leaves[1], v=leaves[2]), **options)
    if case.lse:
        return torch.autograd.grad(result, leaves, (given.dout, given.dlse))
    return torch.autograd.grad(result, leaves, given.dout)


@pytest.mark.fault("F9")
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.launches and differentiable(case) and case.name not in ROUNDED_AWAY],
    ids=lambda case: case.name,
)
def test_gradients_err_by_at_most_twice_torch(case):
    inputs = case.inputs("cuda")
    given = incoming(case, inputs)
    with poisoned_memory():
        found = gradients(case, inputs, given)
    judge_gradients(found, gradient_oracle(case, inputs, given), eager_gradients(case, inputs, given), given)


@pytest.mark.fault("F4", "F5")
def test_dk_and_dv_repeat_their_bits():
    named = case("dim 128 causal")
    inputs = named.inputs("cuda")
    given = incoming(named, inputs)
    _, dk, dv = gradients(named, inputs, given)
    for _ in range(100):
        _, dk_again, dv_again = gradients(named, inputs, given)
        assert torch.equal(dk, dk_again)
        assert torch.equal(dv, dv_again)


@pytest.mark.fault("F1", "F2", "F3")
@pytest.mark.parametrize("name", ORDERED)
def test_deterministic_gradients_repeat_their_bits(name):
    named = case(name)
    inputs = named.inputs("cuda")
    given = incoming(named, inputs)
    first = gradients(named, inputs, given, deterministic=True)
    judge_gradients(
        first, gradient_oracle(named, inputs, given), eager_gradients(named, inputs, given), given
    )
    for _ in range(1000):
        again = gradients(named, inputs, given, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_an_incoming_gradient_may_be_expanded():
    named = case("dim 64 causal")
    inputs = named.inputs("cuda")
    given = incoming(named, inputs)
    dout = torch.randn(named.head_dim, device="cuda").to(given.dout).expand(given.dout.shape)
    given = replace(given, dout=dout)
    found = gradients(named, inputs, given)
    judge_gradients(
        found, gradient_oracle(named, inputs, given), eager_gradients(named, inputs, given), given
    )
